"""How the ranks of a group share a weight under tensor or expert parallelism, noted on the parameter.

Code that reads or writes whole weights (weight sync, checkpoints, saved models, norms of gradients) asks for it here
and need not know which kind of parallelism it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid_rlhf.runtime.world import World

_ATTRIBUTE = "weight_split"


@dataclass(frozen=True)
class SplitRanks:
    """The ranks of an engine whose weights are split, in two directions."""

    parts: World
    """Ranks that have the parts of each weight; they are consecutive."""
    replicas: World
    """Ranks that have the same parts."""

    @staticmethod
    def of(world: World, size: int) -> SplitRanks:
        """Groups of so many ranks; the size divides the number of ranks. Every rank of the run calls."""
        parts = world.split(size)
        replicas = [world.part(world.members[first::size]) for first in range(size)]
        return SplitRanks(parts, replicas[world.rank % size])


@dataclass(frozen=True)
class WeightSplit:
    """How the ranks of a group share a weight."""

    ranks: World
    dim: int | None
    """Dimension of the equal parts that the ranks have; None: each has the whole weight."""

    @property
    def parts(self) -> int:
        """Number of parts."""
        return 1 if self.dim is None else self.ranks.size

    def local(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole weight, a view."""
        return whole if self.dim is None else whole.chunk(self.ranks.size, dim=self.dim)[self.ranks.rank]

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole weight from this rank's part. Every rank calls."""
        if self.dim is None:
            return part
        return self.ranks.all_gather(part.detach().contiguous()).movedim(0, self.dim).flatten(self.dim, self.dim + 1)


_NOT_SHARED = WeightSplit(World(0, 1, 0, 1, torch.device("cpu")), None)


def note_split(parameter: nn.Parameter, split: WeightSplit) -> None:
    """Note how the ranks share a parameter."""
    vars(parameter)[_ATTRIBUTE] = split


def split_of(parameter: nn.Parameter) -> WeightSplit:
    """Return how the ranks of a group share a parameter; by default the group is this rank."""
    split: WeightSplit = vars(parameter).get(_ATTRIBUTE, _NOT_SHARED)
    return split
