"""The data of an RL step, and its division into batches.

Read `rollout.py` (the tensors of a step, and the recorded experts), `sharing.py` (which rank holds which rows), then
`planning.py` (mini-batches and micro-batches).
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
)
from hybrid_rlhf.rl.batch.sharing import (
    LocalRows,
    RowIndex,
    restored_rows,
    row_values,
    with_columns_of_all_ranks,
    with_prefix,
    without_prefix,
)

__all__ = [
    "ROUTER_AGREEMENT",
    "Batch",
    "Episode",
    "LocalRows",
    "MiniBatchPlan",
    "MiniBatchPlanner",
    "Rollout",
    "RolloutRoutes",
    "RouterAgreement",
    "RowIndex",
    "SampledTokens",
    "restored_rows",
    "row_values",
    "with_columns_of_all_ranks",
    "with_prefix",
    "without_prefix",
]
