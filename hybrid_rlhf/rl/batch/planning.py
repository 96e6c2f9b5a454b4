"""The mini-batches of a rollout, and the micro-batches of each rank.

Lengths decide which rows a rank computes, so that all ranks have the same work; every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybrid_rlhf.configs.sections.batch_plan import MicroBatches
from hybrid_rlhf.data.loaders import shard_batch
from hybrid_rlhf.rl.batch.rollout import Rollout


@dataclass(frozen=True)
class MiniBatchPlan:
    """Which rows form a mini-batch, and which micro-batches of it this rank computes."""

    mini_batches: list[list[list[int | None]]]
    """[mini-batch][micro-batch][row]; None is an empty row."""
    tokens: list[float]
    """Response tokens of each mini-batch over all ranks, the denominator of its losses."""
    sequences: list[int]
    """Completions of each mini-batch over all ranks."""

    @property
    def micro_batches(self) -> list[list[int | None]]:
        """This rank's micro-batches of all mini-batches."""
        return [micro_batch for mini_batch in self.mini_batches for micro_batch in mini_batch]


class MiniBatchPlanner:
    """Deals rows into mini-batches, and those by length to ranks; computes the same plan on every rank."""

    def __init__(self, micro_batches: MicroBatches, *, rank: int, ranks: int, seed: int) -> None:
        """Take the size of a micro-batch, the ranks that share each mini-batch, and the seed of the shuffles."""
        self._micro_batches, self._rank, self._ranks, self._seed = micro_batches, rank, ranks, seed

    def plan(
        self, rollout: Rollout, *, step: int = 0, epoch: int = 0, mini_batches: int = 1, together: int = 1
    ) -> MiniBatchPlan:
        """The mini-batches of a pass over a rollout.

        Args:
            rollout: the rows.
            step: key of the shuffle.
            epoch: key of the shuffle.
            mini_batches: number of equal parts.
            together: neighbouring rows that stay in one micro-batch.
        """
        lengths, tokens = (
            column.view(-1, together).sum(dim=1).tolist()
            for column in (rollout.lengths, rollout.response_mask.sum(dim=1))
        )
        micro_batches = self._micro_batches
        if micro_batches.rows is not None:
            micro_batches = replace(micro_batches, rows=max(1, micro_batches.rows // together))
        order = np.random.default_rng([self._seed, step, epoch]).permutation(len(lengths)).tolist()
        size = -(-len(order) // mini_batches)
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        dealt = [
            shard_batch(
                part, [lengths[i] for i in part], rank=self._rank, ranks=self._ranks, micro_batches=micro_batches
            )
            for part in parts
        ]
        return MiniBatchPlan(
            [[_neighbours(units, together) for units in micro] for micro in dealt],
            [float(sum(tokens[i] for i in part)) for part in parts],
            [len(part) * together for part in parts],
        )


def _neighbours(units: Sequence[int | None], together: int) -> list[int | None]:
    """The rows of units of neighbours."""
    return [None if unit is None else unit * together + place for unit in units for place in range(together)]
