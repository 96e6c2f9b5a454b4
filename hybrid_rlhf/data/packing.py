"""Packs several short conversations into one row by best-fit decreasing, so that rows have similar lengths.

Batch sizes are counted in rows, so rows of very different lengths make updates of very different sizes. A packed row
contains its conversations as separate sequences. Collation puts each in a separate row of the tensor, so that none
attends to another and positions start at 0, for any model.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830), section 2.2. Deviation:
conversations longer than a row have been truncated or dropped earlier, instead of being split.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybrid_rlhf.data.row_views import RowSequence, column_array
from hybrid_rlhf.runtime.observability.logs import logger


def best_fit(lengths: Sequence[int], *, capacity: int, seed: int) -> list[list[int]]:
    """The item indices of each bin: items, longest first, go into the fullest bin with enough room.

    Args:
        lengths: length of each item, at most `capacity`.
        capacity: capacity of a bin.
        seed: seed of the order of items with equal lengths.
    """
    shuffled = np.random.default_rng([seed, 2]).permutation(len(lengths))
    order = shuffled[np.argsort(-np.asarray(lengths, dtype=np.int64)[shuffled], kind="stable")].tolist()
    bins: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # the keys of with_room, sorted; at most as many as distinct lengths
    for item in order:
        length = lengths[item]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            number = len(bins)
            room = capacity
            bins.append([])
        else:
            room = rooms[place]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        bins[number].append(item)
        room -= length
        if room and room not in with_room:
            insort(rooms, room)
        if room:
            with_room[room].append(number)
    return bins


class PackedRows:
    """Packed rows of a data set; each has a list `sequences` of rows of that data set."""

    def __init__(self, rows: RowSequence, bins: Sequence[Sequence[int]], *, capacity: int) -> None:
        """Take the rows and the indices in each bin; reads only the column `length`."""
        self._rows = rows
        self._bins = bins
        self._capacity = capacity
        self._lengths = column_array(rows, "length").tolist()

    @property
    def column_names(self) -> list[str]:
        """The columns that indexing by name returns."""
        return ["length", "padded_tokens"]

    def __len__(self) -> int:
        """Number of packed rows."""
        return len(self._bins)

    def __getitem__(self, key: Any) -> Any:
        """A packed row by index, or a column by name: `length`, the tokens of each packed row, or `padded_tokens`, an
        upper bound if a model pads the sequences to the longest."""
        if key == "length":
            return [sum(self._lengths[item] for item in items) for items in self._bins]
        if key == "padded_tokens":
            return [len(items) * self._capacity for items in self._bins]
        return {"sequences": [self._rows[item] for item in self._bins[key]]}


def pack_rows(rows: RowSequence, *, capacity: int, seed: int, log: bool = False) -> PackedRows:
    """Pack rows into as few rows of at most `capacity` tokens as best-fit finds; `log` logs how full they are."""
    lengths = column_array(rows, "length").tolist()
    bins = best_fit(lengths, capacity=capacity, seed=seed)
    if log:
        logger.info(
            "packing: %s conversations in %s packed rows of %s tokens, %.0f%% full",
            f"{len(lengths):,}",
            f"{len(bins):,}",
            f"{capacity:,}",
            100 * sum(lengths) / (capacity * len(bins)),
        )
    return PackedRows(rows, bins, capacity=capacity)


def row_sequences(row: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any] | None]:
    """The sequences of a packed row; otherwise the row itself."""
    return [row] if row is None or "sequences" not in row else row["sequences"]  # type: ignore[no-any-return]
