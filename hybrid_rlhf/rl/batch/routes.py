"""The recorded experts of a rollout's completions, and how many of them the actor's training forward uses.

Why apart from the other tensors: they take a byte per mixture and expert, 384 for a token of Qwen3-30B-A3B. They lie in
host memory without padding, for those completions that have them; the device gets those of a micro-batch.

Shapes: N completions, T time, E mixtures of experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.runtime.world import World

ROUTER_AGREEMENT = "rollout/router_agreement"


@dataclass(frozen=True)
class RolloutRoutes:
    """The experts of the first tokens of each completion, its prompt included."""

    experts: Tensor
    """[sum of lengths, E, k] int8 or int16 on the CPU, one completion after the other; -1: not recorded."""
    lengths: Tensor
    """[N] int64 on the CPU; 0 where nothing is recorded."""

    @classmethod
    def of(cls, recorded: Sequence[np.ndarray | None]) -> Self | None:
        """Those of N completions [tokens, E, k]; none if none has any."""
        known = [torch.from_numpy(routes) for routes in recorded if routes is not None]
        if not known:
            return None
        lengths = [0 if routes is None else len(routes) for routes in recorded]
        return cls(torch.cat(known), torch.tensor(lengths))

    def rows(self, indices: Sequence[int | None]) -> RolloutRoutes:
        """Of some completions; None has none."""
        ends, sizes = self.lengths.cumsum(0).tolist(), self.lengths.tolist()
        parts = [self.experts[ends[i] - sizes[i] : ends[i]] for i in indices if i is not None]
        lengths = [0 if i is None else sizes[i] for i in indices]
        return RolloutRoutes(torch.cat([self.experts[:0], *parts]), torch.tensor(lengths))

    @classmethod
    def joined(cls, parts: Sequence[tuple[Self | None, int]]) -> Self | None:
        """Those of several rollouts, given with their numbers of completions; none if none has any."""
        known = [routes.experts for routes, _ in parts if routes is not None]
        if not known:
            return None
        lengths = [
            torch.zeros(count, dtype=torch.long) if routes is None else routes.lengths for routes, count in parts
        ]
        return cls(torch.cat(known), torch.cat(lengths))

    def padded(self, width: int, device: torch.device) -> Tensor:
        """[N, width, E, k] on a device."""
        known = torch.arange(width) < self.lengths[:, None]
        padded = torch.full((*known.shape, *self.experts.shape[1:]), -1, dtype=self.experts.dtype)
        padded[known] = self.experts
        return padded.to(device)

    def tensors(self) -> dict[str, Tensor]:
        """Both tensors, by name."""
        return dict(vars(self))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self | None:
        """What `tensors` describes; none for no tensors."""
        return cls(**tensors) if tensors else None


class RouterAgreement:
    """Adds up, over forwards of a rollout, how many of its recorded choices the actor's routers used."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, actor: ModelEngine) -> None:
        """Take the actor's last forward in."""
        if (counts := actor.router_agreement) is not None:
            self._counts += counts

    def metrics(self, world: World) -> dict[str, float]:
        """The share over all ranks, each of which must call; {} if nothing was recorded."""
        used, recorded = world.all_reduce(self._counts).tolist()
        return {ROUTER_AGREEMENT: used / recorded} if recorded else {}
