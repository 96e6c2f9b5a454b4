"""What an RL step learns from, and how it is divided.

Read `rollout.py` (the tensors of a step), `planning.py` (mini-batches and micro-batches), then `routes.py` (recorded
experts).
"""

from hybrid_rlhf.rl.batch.planning import MiniBatchPlan, MiniBatchPlanner
from hybrid_rlhf.rl.batch.rollout import Batch, Rollout, SampledTokens, scatter_rows, with_prefix, without_prefix
from hybrid_rlhf.rl.batch.routes import ROUTER_AGREEMENT, RolloutRoutes, RouterAgreement

__all__ = [
    "ROUTER_AGREEMENT",
    "Batch",
    "MiniBatchPlan",
    "MiniBatchPlanner",
    "Rollout",
    "RolloutRoutes",
    "RouterAgreement",
    "SampledTokens",
    "scatter_rows",
    "with_prefix",
    "without_prefix",
]
