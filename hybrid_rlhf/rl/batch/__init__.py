"""What an RL step learns from, and how it is divided.

Read `rollout.py` (the tensors of a step, and the experts that are recorded), then `planning.py` (mini-batches and
micro-batches).
"""

from hybrid_rlhf.rl.batch.planning import MiniBatchPlan, MiniBatchPlanner
from hybrid_rlhf.rl.batch.rollout import (
    ROUTER_AGREEMENT,
    Batch,
    Episode,
    Rollout,
    RolloutRoutes,
    RouterAgreement,
    SampledTokens,
    scatter_rows,
    with_prefix,
    without_prefix,
)

__all__ = [
    "ROUTER_AGREEMENT",
    "Batch",
    "Episode",
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
