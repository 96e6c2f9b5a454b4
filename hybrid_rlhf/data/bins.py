"""Several short conversations as one row: best-fit decreasing, so that rows are of about one length.

Why: an update is counted in rows, and rows of all lengths make updates of all sizes. A packed row holds its
conversations side by side; collation lays each out as a sequence of its own, so that none attends to another and
positions begin anew, whatever the model.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830), section 2.2. Deviation: what
is longer than a row was cut or dropped before.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybrid_rlhf.data.augmented import Rows
from hybrid_rlhf.runtime.logs import LOGGER_NAME

logger = logging.getLogger(LOGGER_NAME)


def best_fit(lengths: Sequence[int], *, capacity: int, seed: int) -> list[list[int]]:
    """Places of the items of each bin: the longest first, each to the fullest bin that still has room.

    Args:
        lengths: of the items, at most `capacity` each.
        capacity: of a bin.
        seed: of the order among items of one length.
    """
    shuffled = np.random.default_rng([seed, 2]).permutation(len(lengths))
    order = shuffled[np.argsort(-np.asarray(lengths, dtype=np.int64)[shuffled], kind="stable")].tolist()
    bins: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # the keys of with_room, sorted: no more than there are lengths
    for item in order:
        length = lengths[item]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            number, room = len(bins), capacity
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
    """Rows of tokens, put together: a row of it has `sequences`, rows of the data set."""

    def __init__(self, rows: Rows, bins: Sequence[Sequence[int]], *, capacity: int) -> None:
        """Take the rows and which of them make one; lengths come from the `length` column, no row is read."""
        self._rows, self._bins, self._capacity = rows, bins, capacity
        self._lengths = list(rows["length"])

    @property
    def column_names(self) -> list[str]:
        """What `[name]` knows."""
        return ["length", "padded_tokens"]

    def __len__(self) -> int:
        """Packed rows."""
        return len(self._bins)

    def __getitem__(self, key: Any) -> Any:
        """A packed row by its place; or a column: `length`, the tokens of each, or `padded_tokens`, the most that its
        sequences take in a model that pads them to the longest."""
        if key == "length":
            return [sum(self._lengths[item] for item in items) for items in self._bins]
        if key == "padded_tokens":
            return [len(items) * self._capacity for items in self._bins]
        return {"sequences": [self._rows[item] for item in self._bins[key]]}


def packed(rows: Rows, *, capacity: int, seed: int, tell: bool = False) -> PackedRows:
    """Rows of tokens in as few rows of at most `capacity` tokens as best-fit finds; says how full they are."""
    lengths = list(rows["length"])
    bins = best_fit(lengths, capacity=capacity, seed=seed)
    if tell:
        logger.info(
            "packing: %s conversations in %s packed rows of %s tokens, %.0f%% full",
            f"{len(lengths):,}", f"{len(bins):,}", f"{capacity:,}", 100 * sum(lengths) / (capacity * len(bins)),
        )  # fmt: skip
    return PackedRows(rows, bins, capacity=capacity)


def sequences(row: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any] | None]:
    """What a row of the data is made of: the sequences of a packed one, else itself."""
    return [row] if row is None or "sequences" not in row else row["sequences"]  # type: ignore[no-any-return]
