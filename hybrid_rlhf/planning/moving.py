"""Whether a run gains by moving to another plan: what a step gains, times the steps left, against the cost of moving.

A run moves through a checkpoint: all ranks write the states of the learners, build all engines anew under the other
plan, and read the states. The building is taken to last as long as it did at the start of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.job import RLJob
from hybrid_rlhf.planning.plans import StepPlan

STATE_BYTES = 12
"""Of each trained parameter in a checkpoint: float32 weight and AdamW's two moments."""
_DISK_BYTES_PER_SECOND = 2.0**29
"""At which a checkpoint is taken to be written, and read again; a local NVMe disk reaches more."""


@dataclass(frozen=True)
class MovePrice:
    """What a move costs once and gains in every step, in predicted seconds."""

    cost_seconds: float
    gain_seconds: float

    def pays(self, *, steps_left: int) -> bool:
        """Whether the steps that are left gain more than the move costs."""
        return self.gain_seconds * steps_left > self.cost_seconds


def move_seconds(costs: Costs, plan: StepPlan, *, build_seconds: float) -> float:
    """Predicted seconds of a move to a plan.

    Args:
        costs: of the job.
        plan: to move to; its first weight sync is part of the cost.
        build_seconds: which building the engines has taken.
    """
    checkpoint = 2 * state_bytes(costs.job) / _DISK_BYTES_PER_SECOND
    return checkpoint + build_seconds + costs.weight_sync(plan).seconds


def state_bytes(job: RLJob) -> float:
    """Size of the checkpoint that a move writes and reads."""
    return STATE_BYTES * sum(role.sizes.trained for role in job.roles.values() if role.is_trained)
