"""Running sums of losses over micro-batches and ranks, divided once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.runtime.world import World


class RunningSums:
    """Adds up LossSums on the device; one collective and one synchronisation to read them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=device))

    def add(self, loss: LossSum) -> None:
        """Add a micro-batch."""
        self._sums["total"] += loss.total.detach()
        self._sums["count"] += loss.count
        for name, value in loss.stats.items():
            self._sums[name] += value.detach()

    def total(self, name: str) -> Tensor:
        """A sum so far, on this rank: a copy, float64."""
        return self._sums[name].clone()

    def state_dict(self) -> dict[str, float]:
        """The sums so far, on this rank."""
        return {name: float(value) for name, value in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint."""
        for name, value in state.items():
            self._sums[name] = torch.tensor(value, dtype=torch.float64, device=self._device)

    def means(self, world: World) -> dict[str, float]:
        """Every sum over all ranks divided by the count over all ranks, "loss" for the total; and the "count".

        Every rank must call, having added the same names.
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
