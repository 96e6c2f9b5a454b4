"""The mini-batches of a rollout, and the micro-batches of each rank.

Lengths decide which rows a rank computes, so that all ranks have the same work; every rank computes the same plan. The
rows are sharded over the ranks of the role that computes, so a plan serves every role.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.data.loaders import shard_batch
from hybrid_rlhf.rl.sharing import RowIndex
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.world import World


@dataclass(frozen=True)
class MiniBatchPlan:
    """The rows of each mini-batch, and the part of them that a rank computes."""

    index: RowIndex
    """The numbers of the rows, and where they are."""
    rows: list[list[int]]
    """[mini-batch][unit]; a unit is `together` neighbouring rows. Rows that are not learned from are in none."""
    tokens: list[float]
    """Response tokens of each mini-batch over all ranks, the denominator of its losses."""
    sequences: list[int]
    """Completions of each mini-batch over all ranks."""
    unit_lengths: list[int]
    """Tokens of each unit, with its padding where the model computes it."""
    together: int
    size: MicroBatches
    """Size of a micro-batch, in units."""

    def rows_of(self, mini_batch: int) -> list[int]:
        """The rows of a mini-batch, over all ranks."""
        return [unit * self.together + place for unit in self.rows[mini_batch] for place in range(self.together)]

    def mini_batch(self, number: int, world: World) -> list[list[int | None]]:
        """[micro-batch][row] of a mini-batch for this rank, one of those that share the rows; None: an empty row."""
        units = self.rows[number]
        micro_batches = shard_batch(
            units,
            [self.unit_lengths[unit] for unit in units],
            rank=world.rank,
            ranks=world.size,
            micro_batches=self.size,
        )
        return [
            [None if unit is None else unit * self.together + place for unit in part for place in range(self.together)]
            for part in micro_batches
        ]

    def mini_batches(self, world: World) -> list[list[list[int | None]]]:
        """[mini-batch][micro-batch][row] for this rank; None is an empty row."""
        return [self.mini_batch(number, world) for number in range(len(self.rows))]

    def micro_batches(self, world: World, tensor_parallel: int = 1) -> list[list[int | None]]:
        """This rank's micro-batches of all mini-batches; [] on a rank outside of those that share the rows.

        Tensor-parallel groups of consecutive ranks share the rows: the ranks of a group have the same. They, and the
        copy of a critic, have inference weights, with which each computes its rows alone.
        """
        if not world.is_member:
            return []
        shared = replace(world, rank=world.rank // tensor_parallel, size=world.size // tensor_parallel)
        together = self.size.ranks
        alone = replace(self, size=replace(self.size, ranks=1, tokens=self.size.tokens // together))
        plan = alone if tensor_parallel > 1 or world.size % together else self
        return [micro_batch for mini_batch in plan.mini_batches(shared) for micro_batch in mini_batch]


class MiniBatchPlanner:
    """Divides rows into mini-batches; computes the same plan on every rank."""

    def __init__(self, micro_batches: MicroBatches, *, seed: int, world: World) -> None:
        """Take the size of a micro-batch, the seed of the shuffles, and the ranks that hold rows."""
        self._micro_batches = micro_batches
        self._seed = seed
        self._world = world

    def plan(
        self, rollout: Rollout, *, step: int = 0, epoch: int = 0, mini_batches: int = 1, together: int = 1
    ) -> MiniBatchPlan:
        """The mini-batches of a pass over a rollout. Every rank calls.

        Args:
            rollout: this rank's rows.
            step: key of the shuffle.
            epoch: key of the shuffle.
            mini_batches: number of equal parts.
            together: neighbouring rows that stay in one micro-batch.
        """
        index = rollout.numbered(self._world)
        micro_batches = self._micro_batches
        lengths = index.lengths.view(-1, together)
        unit_lengths = lengths.amax(dim=1) * together if micro_batches.padded else lengths.sum(dim=1)
        tokens = index.responses.view(-1, together).sum(dim=1).tolist()
        if micro_batches.rows is not None:
            micro_batches = replace(micro_batches, rows=max(1, micro_batches.rows // together))
        units = np.arange(len(tokens))
        if rollout.learned is not None:
            units = units[index.gather(rollout.learned).view(-1, together).all(dim=1).numpy()]
        order = units[np.random.default_rng([self._seed, step, epoch]).permutation(len(units))].tolist()
        size = max(1, -(-len(order) // mini_batches))
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        return MiniBatchPlan(
            index,
            parts,
            [float(sum(tokens[i] for i in part)) for part in parts],
            [len(part) * together for part in parts],
            unit_lengths.tolist(),
            together,
            micro_batches,
        )
