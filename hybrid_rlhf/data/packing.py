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

from hybrid_rlhf.data.row_views import RowSequence, RowView, column_array
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


def pack_rows(rows: RowSequence, *, capacity: int, seed: int, log: bool = False) -> RowView:
    """Pack rows into as few rows of at most `capacity` tokens as best-fit finds; `log` logs how full they are.

    A packed row has a list `sequences` of rows. Its column `length` is its tokens, and `padded_tokens` an upper bound
    if a model pads the sequences to the longest.
    """
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
    columns = {
        "length": [sum(lengths[item] for item in items) for items in bins],
        "padded_tokens": [len(items) * capacity for items in bins],
    }

    def row(place: int) -> dict[str, Any]:
        return {"sequences": [rows[item] for item in bins[place]]}

    return RowView([*columns], len(bins), row=row, column=columns.__getitem__)


def row_sequences(row: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any] | None]:
    """The sequences of a packed row; otherwise the row itself."""
    return [row] if row is None or "sequences" not in row else row["sequences"]  # type: ignore[no-any-return]
