"""A rollout whose updates are not all made: what a run that is stopped in the midst of a step goes on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybrid_rlhf.algorithms.experience import Experience
from hybrid_rlhf.algorithms.updater import Progress
from hybrid_rlhf.runtime.world import World


@dataclass(frozen=True)
class HalfUsed:
    """A scored rollout, and how far the updates from it are."""

    step: int
    """That it belongs to."""
    prompts: Sequence[int]
    """The prompt of each sequence, by its row in the data."""
    experience: Experience
    metrics: Mapping[str, float]
    """Of its scoring."""
    progress: Progress
    start: float | None
    """When the step began, in seconds of this process; none: in another one."""
    sampled_tokens: tuple[float, float] = (0.0, 0.0)
    """Of all completions, chosen or not, and of these with their prompts."""

    def state_dict(self, world: World) -> dict[str, Any]:
        """What a checkpoint keeps beside the experience's tensors; every rank calls."""
        return {
            "prompts": list(self.prompts),
            "metrics": dict(self.metrics),
            "progress": self.progress.state_dict(world),
        }

    @classmethod
    def restore(cls, step: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor], world: World) -> HalfUsed:
        """What `state_dict` and `Experience.tensors` gave."""
        progress = Progress(world.device)
        progress.load_state_dict(state["progress"], world)
        experience = Experience.from_tensors(tensors, world.device)
        return cls(step, state["prompts"], experience, state["metrics"], progress, None)
