"""Log-probs of a rollout as its updates computed them: what single-update algorithms take as old, and token ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from hybrid_rlhf.rl.batch import scatter_rows
from hybrid_rlhf.runtime.world import World


class LastLogprobs:
    """Collects the log-probs of each row in its last update; ranks hold the rows that they computed."""

    def __init__(self, like: Tensor) -> None:
        """Take log-probs [N, T] of the rollout, for their shape."""
        self._values = torch.zeros_like(like)
        self._known = torch.zeros(len(like), dtype=torch.bool, device=like.device)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], world: World) -> Self | None:
        """What `tensors` describes; the first rank holds it. None for no tensors."""
        if not tensors:
            return None
        restored = cls(tensors["values"].to(world.device))
        restored._known |= tensors["known"].to(world.device)
        if world.rank == 0:
            restored._values += tensors["values"].to(world.device)
        return restored

    def tensors(self, world: World) -> dict[str, Tensor]:
        """State for a checkpoint; every rank calls, and gets the same."""
        return {"values": self.of_all_ranks(world), "known": self._known}

    def begin(self, rows: Sequence[int]) -> None:
        """An update of these rows, over all ranks: what other ranks had of them is of an earlier one."""
        self._values[list(rows)] = 0.0
        self._known[list(rows)] = True

    def add(self, rows: Sequence[int | None], logprobs: Tensor) -> None:
        """The log-probs [n, t] of a micro-batch of this rank."""
        scatter_rows(self._values, rows, logprobs)

    def of_all_ranks(self, world: World) -> Tensor:
        """[N, T], 0 in rows without an update; every rank calls."""
        return world.all_reduce(self._values.clone())

    def ratios(self, old_logprobs: Tensor, world: World) -> Tensor:
        """[N, T] p(last update) / p(before the updates), NaN in rows without an update; every rank calls."""
        found = (self.of_all_ranks(world) - old_logprobs).exp()
        return found.masked_fill(~self._known[:, None], torch.nan)
