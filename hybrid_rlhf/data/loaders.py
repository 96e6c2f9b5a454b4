"""Batches: the rows of each update, their order, and how they are sharded over ranks.

A global batch does not depend on the number of ranks. Its rows are sharded by length: every rank gets the same number
of micro-batches, with nearly equal tokens. The number must be equal because ZeRO-3 gathers weights in each of them.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.data.row_views import RowSequence, column_array

BATCH_SIZE_KEY = "train.global_batch_size"
FEW_UPDATES = 10
"""Number of updates per epoch below which a warning is logged."""


def shard_batch(
    rows: Sequence[int], lengths: Sequence[int], *, rank: int, ranks: int, micro_batches: MicroBatches
) -> list[list[int | None]]:
    """The micro-batches of one rank in a global batch.

    Args:
        rows: row indices of the global batch.
        lengths: tokens of each row.
        rank: the rank.
        ranks: number of ranks. All have the same number of micro-batches; one without rows contains None, an empty row.
        micro_batches: size of the micro-batches.
    """
    group = micro_batches.ranks
    if group > 1:
        # the ranks of a group compute each micro-batch together; its rows are those of one of them, by turns
        alone = replace(micro_batches, ranks=1)
        shared = shard_batch(rows, lengths, rank=rank // group, ranks=ranks // group, micro_batches=alone)
        return [rows_of_one if turn % group == rank % group else [None] for turn, rows_of_one in enumerate(shared)]
    order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
    size = micro_batches.rows
    if size is None and micro_batches.padded:
        per_rank = -(-len(rows) // ranks)
        fitting = max(1, micro_batches.tokens // max(lengths))
        size = -(-per_rank // -(-per_rank // fitting))
    if size is not None:
        return _shard_by_rows([rows[i] for i in order], rank=rank, ranks=ranks, size=size)
    return _shard_by_tokens(
        [rows[i] for i in order], [lengths[i] for i in order], rank=rank, ranks=ranks, limit=micro_batches.tokens
    )


def _shard_by_rows(rows: list[int], *, rank: int, ranks: int, size: int) -> list[list[int | None]]:
    """Shard rows, longest first, into micro-batches of `size` rows, padded with None."""
    ordered: list[int | None] = rows + [None] * (-len(rows) % (ranks * size))  # type: ignore[operator]
    # In alternating order: rank 0 gets the longest row of the first round and the shortest of the second.
    rounds = [ordered[start : start + ranks] for start in range(0, len(ordered), ranks)]
    mine = [chunk[rank] if number % 2 == 0 else chunk[ranks - 1 - rank] for number, chunk in enumerate(rounds)]
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def _shard_by_tokens(
    rows: list[int], lengths: list[int], *, rank: int, ranks: int, limit: int
) -> list[list[int | None]]:
    """Assign rows, longest first, to the micro-batch with the fewest tokens; as few micro-batches as the limit allows.

    This is longest-processing-time-first scheduling (Graham 1969, "Bounds on multiprocessing timing anomalies").
    """
    most = max(limit, lengths[0])
    # a micro-batch holds at most `most // length` rows of at least this length: a lower bound of the rounds
    parts = max(-(-(place + 1) // (most // length)) for place, length in enumerate(lengths))
    rounds = max(-(-sum(lengths) // (ranks * limit)), -(-parts // ranks))
    while True:
        loads = [(0, number) for number in range(ranks * rounds)]
        members: list[list[int]] = [[] for _ in loads]
        for row, length in zip(rows, lengths, strict=True):
            load, number = heapq.heappop(loads)
            members[number].append(row)
            heapq.heappush(loads, (load + length, number))
        # A row that exceeds the limit by itself eventually gets its own micro-batch.
        if max(load for load, _ in loads) <= most or ranks * rounds >= len(rows):
            break
        rounds += 1
    heaviest_first = [members[number] for _, number in sorted(loads, key=lambda entry: (-entry[0], entry[1]))]
    return [list(heaviest_first[start + rank]) or [None] for start in range(0, len(loads), ranks)]


def require_batch(rows: int, global_batch_size: int, size_key: str = BATCH_SIZE_KEY) -> None:
    """Raise UserError unless there are rows for an update.

    Args:
        rows: training rows.
        global_batch_size: rows of an update.
        size_key: the setting that determines the number of rows of an update.
    """
    if rows < global_batch_size:
        raise UserError(
            f"the training data must have at least one batch of {global_batch_size} rows, got {rows}: add rows or "
            f"reduce {size_key} to {rows} or less"
        )


class RowStream:
    """The row indices of a data set, in a new seeded order in each epoch, taken in any number at a time.

    It ends after `epochs`; with None it does not.
    """

    def __init__(self, rows: int, *, epochs: float | None, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._all = sys.maxsize if epochs is None else int(rows * epochs)
        self._order: tuple[int, list[int]] = (-1, [])
        self.taken = 0
        """Number of rows taken so far, over all epochs."""

    @property
    def left(self) -> int:
        """Number of rows not taken yet."""
        return self._all - self.taken

    def take(self, count: int) -> list[int]:
        """Take the next rows; fewer at the end of the last epoch."""
        count = min(count, self.left)
        taken = [self._row(self.taken + offset) for offset in range(count)]
        self.taken += count
        return taken

    def _row(self, position: int) -> int:
        epoch, position = divmod(position, self._rows)
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._rows).tolist()
        return self._order[1][position]

    def state_dict(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the position from a checkpoint."""
        self.taken = state["taken"]


class BatchLoader:
    """Yields the micro-batches of this rank in each global batch; its position can be saved and restored.

    Rows are in a seeded order that is new in each epoch, without an incomplete last batch.
    """

    def __init__(
        self,
        dataset: RowSequence,
        *,
        global_batch_size: int,
        world_rank: int,
        world_size: int,
        micro_batches: MicroBatches,
        seed: int,
        in_order: bool = False,
        size_key: str = BATCH_SIZE_KEY,
    ) -> None:
        """Plan the batches from the column `length`, or `tokens` if rows contain several sequences, or `padded_tokens`
        if these are padded to the longest.

        Args:
            dataset: the rows, memory-mapped.
            global_batch_size: rows of a batch over all ranks.
            world_rank: rank of this process.
            world_size: number of ranks over which a batch is sharded.
            micro_batches: size of the micro-batches.
            seed: seed of the order.
            in_order: yield all rows in their order; an incomplete last batch is padded with None rows.
            size_key: the setting that determines the size of a batch.

        Raises:
            UserError: if there is no complete batch.
        """
        rows = len(dataset)
        if not in_order:
            require_batch(rows, global_batch_size, size_key)
        self._dataset = dataset
        columns = ["padded_tokens"] * micro_batches.padded + ["tokens", "length"]
        self._lengths = column_array(dataset, next(name for name in columns if name in dataset.column_names)).tolist()
        self._rank = world_rank
        self._ranks = world_size
        self._micro_batches = micro_batches
        self._rows = rows
        self._size = global_batch_size
        self._size_key = size_key
        self._seed = seed
        self._in_order = in_order
        self.steps_per_epoch = -(-rows // global_batch_size) if in_order else rows // global_batch_size
        self.epoch = 0
        self.position = 0
        """Number of batches of this epoch that have been yielded."""

    def row_batches(self, max_epochs: int | None = None) -> Iterator[list[int]]:
        """Yield the row indices of each global batch from the current position to the end of the last epoch, endlessly
        if that is None."""
        while max_epochs is None or self.epoch < max_epochs:
            chance = np.random.default_rng([self._seed, self.epoch])
            order = np.arange(self._rows) if self._in_order else chance.permutation(self._rows)
            while self.position < self.steps_per_epoch:
                start = self.position * self._size
                self.position += 1
                yield order[start : start + self._size].tolist()
            self.epoch = self.epoch + 1
            self.position = 0

    def upcoming(self, batches: int) -> list[int]:
        """The distinct rows of the next `batches` batches, in the order of their first use."""
        lookahead = copy(self)
        upcoming = dict[int, None]()
        for rows in islice(lookahead.row_batches(), batches):
            upcoming |= dict.fromkeys(rows)
            if len(upcoming) == self._rows:
                break
        return list(upcoming)

    def state_dict(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the position from a checkpoint."""
        self.epoch = state["epoch"]
        self.position = state["position"]

    def few_updates_text(self) -> str:
        """A warning that an epoch has fewer updates than most data sets need, with the batch size that gives more;
        empty if it has enough."""
        steps = self.steps_per_epoch
        if steps >= FEW_UPDATES or self._size == 1:
            return ""
        smaller = max(1, self._rows // FEW_UPDATES)
        return (
            f"an epoch of {self._rows:,} rows has only {steps} update{'s' * (steps != 1)} of {self._size} rows: "
            f"{self._size_key} {smaller} gives {self._rows // smaller}"
        )

    def iterate(self, max_epochs: int | None = None) -> Iterator[list[list[dict[str, Any] | None]]]:
        """Yield from the current position the micro-batches of this rank in each global batch."""
        for rows in self.row_batches(max_epochs):
            lengths = [self._lengths[row] for row in rows]
            shard = shard_batch(rows, lengths, rank=self._rank, ranks=self._ranks, micro_batches=self._micro_batches)
            yield [[None if row is None else self._dataset[row] for row in micro] for micro in shard]
