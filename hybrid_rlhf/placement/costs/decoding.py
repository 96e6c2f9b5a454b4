"""Continuous batching as stretches of equal decoding steps: rows leave as they finish, and the next ones join."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_rlhf.placement.costs.passes import Numbers

_MOST_BUNDLES = 256
"""Rows of a group that decoding is simulated with; more are bundled."""


@dataclass(frozen=True)
class DecodeSegments:
    """Decoding steps of the sampling groups with a constant number of rows, one group after the other."""

    rows: Numbers
    context: Numbers
    """Mean tokens per row, the prompt included."""
    steps: Numbers
    groups: list[int]
    """Where the segments of each group begin."""
    completions: list[int]
    """Of each group."""

    @classmethod
    def of(cls, shares: Sequence[list[int]], *, prompt_tokens: float, rows_at_once: int) -> DecodeSegments:
        """The segments of groups, each with the lengths of its completions."""
        parts = [decode_segments(mine, prompt_tokens, rows_at_once) or [(0.0, 0.0, 0.0)] for mine in shares]
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])]).tolist()
        rows, context, steps = np.asarray([segment for part in parts for segment in part], dtype=np.float64).T
        return cls(rows, context, steps, starts, [len(mine) for mine in shares])


def decode_segments(lengths: list[int], prompt_tokens: float, rows_at_once: int) -> list[tuple[float, float, float]]:
    """Decoding of completions in the order given: at most so many rows at once, the next joins where one finishes.

    Returns:
        (rows, mean tokens of a row, steps) of each stretch in which no row joins or leaves.
    """
    bundle = max(1, math.ceil(len(lengths) / _MOST_BUNDLES))
    waiting = [max(lengths[start : start + bundle]) for start in range(0, len(lengths), bundle)]
    weights = [len(lengths[start : start + bundle]) for start in range(0, len(lengths), bundle)]
    order = list(range(len(waiting)))[::-1]
    active: list[tuple[int, int, int]] = []
    """(end, begin, bundle) of the rows that are decoded."""
    now, running, begun, found = 0, 0, 0.0, []
    while order or active:
        while order and (not active or running + weights[order[-1]] <= rows_at_once):
            place = order.pop()
            heapq.heappush(active, (now + waiting[place], now, place))
            running += weights[place]
            begun += weights[place] * now
        end = active[0][0]
        if end > now:
            age = (now + end) / 2 - begun / running
            found.append((float(running), prompt_tokens + age, float(end - now)))
        now = end
        while active and active[0][0] == now:
            _, begin, place = heapq.heappop(active)
            running -= weights[place]
            begun -= weights[place] * begin
    return found
