"""Sums of losses over micro-batches and ranks, divided once by the global count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.runtime.world import World


class RunningSums:
    """Adds up LossSums on the device; reading them takes one collective and one synchronization."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=device))

    def add(self, loss: LossSum) -> None:
        """Add the loss of a micro-batch."""
        self._sums["total"] += loss.total.detach()
        self._sums["count"] += loss.count
        for name, value in loss.stats.items():
            self._sums[name] += value.detach()

    def total(self, name: str) -> Tensor:
        """A float64 copy of a sum so far on this rank."""
        return self._sums[name].clone()

    def state_dict(self) -> dict[str, float]:
        """The sums so far on this rank, for a checkpoint."""
        return {name: float(value) for name, value in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint."""
        for name, value in state.items():
            self._sums[name] = torch.tensor(value, dtype=torch.float64, device=self._device)

    def means(self, world: World) -> dict[str, float]:
        """Each sum divided by the count, both over all ranks, with the total as "loss"; and the "count".

        Every rank calls, with the same names of sums.
        """
        names = sorted(self._sums)
        summed = torch.stack([self._sums[name] for name in names]) if names else torch.zeros(0, device=self._device)
        sums = dict(zip(names, world.all_reduce(summed).tolist(), strict=True))
        count = sums.pop("count", 0.0)
        means = {name: value / max(count, 1.0) for name, value in sums.items()}
        means["loss"] = means.pop("total", 0.0)
        return {**means, "count": count}


def global_count(count: int | float, world: World) -> float:
    """A count summed over the ranks."""
    return float(world.all_reduce(torch.tensor(float(count), dtype=torch.float64, device=world.device)).item())
