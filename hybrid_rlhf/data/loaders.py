"""Which rows make an update, in which order, and whose they are.

A global batch is the same whatever the number of ranks. Within it rows are dealt by length: every rank gets as many
micro-batches (ZeRO-3 gathers weights in each, and would wait for ever), of nearly equal tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Any

import numpy as np

from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.augmented import Rows


def deal(
    rows: Sequence[int], lengths: Sequence[int], *, rank: int, ranks: int, micro_batches: MicroBatches
) -> list[list[int | None]]:
    """One rank's micro-batches of a global batch.

    Args:
        rows: of the global batch.
        lengths: of each row, in tokens.
        rank: whose share to give.
        ranks: every one gets as many micro-batches; one without rows holds None, an empty row.
        micro_batches: how large they are.
    """
    order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
    size = micro_batches.rows
    if size is None and micro_batches.padded:
        per_rank = -(-len(rows) // ranks)
        fitting = max(1, micro_batches.tokens // max(lengths))
        size = -(-per_rank // -(-per_rank // fitting))
    if size is not None:
        return _deal_rows([rows[i] for i in order], rank=rank, ranks=ranks, size=size)
    return _deal_tokens(
        [rows[i] for i in order], [lengths[i] for i in order], rank=rank, ranks=ranks, limit=micro_batches.tokens
    )


def _deal_rows(rows: list[int], *, rank: int, ranks: int, size: int) -> list[list[int | None]]:
    """Rows, longest first, in micro-batches of a size, filled up with None."""
    ordered: list[int | None] = rows + [None] * (-len(rows) % (ranks * size))  # type: ignore[operator]
    # Snake: rank 0 gets the longest of the first round and the shortest of the second.
    rounds = [ordered[start : start + ranks] for start in range(0, len(ordered), ranks)]
    mine = [chunk[rank] if number % 2 == 0 else chunk[ranks - 1 - rank] for number, chunk in enumerate(rounds)]
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def _deal_tokens(rows: list[int], lengths: list[int], *, rank: int, ranks: int, limit: int) -> list[list[int | None]]:
    """Rows, longest first, each to the micro-batch with the fewest tokens; as few micro-batches as keep the limit."""
    rounds = max(1, -(-sum(lengths) // (ranks * limit)))
    while True:
        loads = [(0, number) for number in range(ranks * rounds)]
        members: list[list[int]] = [[] for _ in loads]
        for row, length in zip(rows, lengths, strict=True):
            load, number = heapq.heappop(loads)
            members[number].append(row)
            heapq.heappush(loads, (load + length, number))
        # A row that alone is too long gets a micro-batch of its own before long.
        if max(load for load, _ in loads) <= max(limit, lengths[0]) or ranks * rounds >= len(rows):
            break
        rounds += 1
    heaviest_first = [members[number] for _, number in sorted(loads, key=lambda entry: (-entry[0], entry[1]))]
    return [list(heaviest_first[start + rank]) or [None] for start in range(0, len(loads), ranks)]


class GlobalBatches:
    """The row indices of each global batch, seeded, with a position that can be saved."""

    def __init__(
        self, rows: int, *, global_batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        if drop_last and rows < global_batch_size:
            fix = f"add rows or set the batch size to {rows} or less"
            raise UserError(f"an update takes {global_batch_size} rows, the training data has {rows}: {fix}")
        self._rows, self._size, self._seed, self._shuffle = rows, global_batch_size, seed, shuffle
        self.steps_per_epoch = rows // global_batch_size if drop_last else -(-rows // global_batch_size)
        self.epoch = 0
        self.position = 0
        """Batches of this epoch that have been given."""

    def iterate(self, max_epochs: int | None = None) -> Iterator[list[int]]:
        """Go on from the position to the end of the last epoch; for ever without one."""
        while max_epochs is None or self.epoch < max_epochs:
            order = np.arange(self._rows)
            if self._shuffle:
                order = np.random.default_rng([self._seed, self.epoch]).permutation(self._rows)
            while self.position < self.steps_per_epoch:
                start = self.position * self._size
                self.position += 1
                yield order[start : start + self._size].tolist()
            self.epoch, self.position = self.epoch + 1, 0

    def upcoming(self, batches: int) -> list[int]:
        """The rows of so many batches from the position on, each once, in the order of their first use."""
        ahead, found = copy(self), dict[int, None]()
        for rows in islice(ahead.iterate(), batches):
            found |= dict.fromkeys(rows)
            if len(found) == self._rows:
                break
        return list(found)

    def state_dict(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        self.epoch, self.position = state["epoch"], state["position"]


class ChosenRows:
    """Some rows of a data set, by their places and in that order."""

    def __init__(self, rows: Rows, places: Sequence[int]) -> None:
        self._rows, self._places = rows, places

    @property
    def column_names(self) -> list[str]:
        """Of the data set."""
        return self._rows.column_names

    def __len__(self) -> int:
        """Chosen rows."""
        return len(self._places)

    def __getitem__(self, key: Any) -> Any:
        """A row by its place among the chosen ones, or a column of them by its name."""
        if isinstance(key, str):
            column = list(self._rows[key])
            return [column[place] for place in self._places]
        return self._rows[self._places[key]]


class RowStream:
    """The rows of a data set, each epoch in a new seeded order, as many at a time as are asked for."""

    def __init__(self, rows: int, *, epochs: int, seed: int) -> None:
        self._rows, self._seed, self._all = rows, seed, rows * epochs
        self._order: tuple[int, list[int]] = (-1, [])
        self.taken = 0
        """Rows that have been given, over all epochs."""

    @property
    def left(self) -> int:
        """Rows still to come."""
        return self._all - self.taken

    def take(self, count: int) -> list[int]:
        """The next rows; fewer where the last epoch ends."""
        count = min(count, self.left)
        taken = [self._row(self.taken + place) for place in range(count)]
        self.taken += count
        return taken

    def _row(self, place: int) -> int:
        epoch, place = divmod(place, self._rows)
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._rows).tolist()
        return self._order[1][place]

    def state_dict(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        self.taken = state["taken"]


class BatchLoader:
    """This rank's micro-batches of each global batch."""

    def __init__(
        self,
        dataset: Rows,
        *,
        global_batch_size: int,
        world_rank: int,
        world_size: int,
        micro_batches: MicroBatches,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        """Plan the batches of a data set with a `length` column, and `tokens` where a row is more than one sequence;
        with `padded_tokens` where padding them takes more than that.

        Args:
            dataset: memory-mapped rows.
            global_batch_size: rows of a batch over all ranks.
            world_rank: whose micro-batches to give.
            world_size: ranks that share a batch.
            micro_batches: how large they are.
            seed: of the order.
            shuffle: a new order each epoch.
            drop_last: leave out a last batch that is not full; otherwise it is filled up with None rows.

        Raises:
            UserError: when there is not one full batch.
        """
        self._dataset = dataset
        columns = ["padded_tokens"] * micro_batches.padded + ["tokens", "length"]
        self._lengths = list(dataset[next(name for name in columns if name in dataset.column_names)])
        self._rank, self._ranks, self._micro_batches = world_rank, world_size, micro_batches
        self.batches = GlobalBatches(
            len(dataset), global_batch_size=global_batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last
        )

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        return self.batches.steps_per_epoch

    def iterate(self, max_epochs: int | None = None) -> Iterator[list[list[dict[str, Any] | None]]]:
        """Go on from the position; each item is this rank's micro-batches of one global batch."""
        for rows in self.batches.iterate(max_epochs):
            lengths = [self._lengths[row] for row in rows]
            dealt = deal(rows, lengths, rank=self._rank, ranks=self._ranks, micro_batches=self._micro_batches)
            yield [[None if row is None else self._dataset[row] for row in micro] for micro in dealt]

    def state_dict(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        self.batches.load_state_dict(state)
