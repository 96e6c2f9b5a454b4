"""The models that take part in a step of on-policy learning."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rlhf.algorithms.rewards import Reward
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.hybrid import HybridEngine


@dataclass(frozen=True)
class Roles:
    """The four roles; an algorithm may do without some."""

    actor: HybridEngine
    reward: Reward
    critic: ModelEngine | None = None
    reference: ModelEngine | None = None
    """The actor itself is its own under its adapters."""

    @property
    def learners(self) -> dict[str, ModelEngine]:
        """Those that train, by name."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def packs(self) -> bool:
        """Whether no role pads its batches."""
        return all(role.packs for role in (self.actor, self.critic, self.reward, self.reference) if role is not None)
