"""Continuous batching as stretches of equal decoding steps: rows leave as they finish, and the next ones join."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_rlhf.planning.costs.passes import Numbers


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
    """Number of completions of each group."""

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
    waiting = lengths[::-1]
    active: list[tuple[int, int]] = []
    """(end, begin) of the rows that are decoded."""
    now = 0
    begun = 0.0
    found = []
    while waiting or active:
        while waiting and len(active) < max(1, rows_at_once):
            heapq.heappush(active, (now + waiting.pop(), now))
            begun += now
        end = active[0][0]
        if end > now:
            age = (now + end) / 2 - begun / len(active)
            found.append((float(len(active)), prompt_tokens + age, float(end - now)))
        now = end
        while active and active[0][0] == now:
            begun -= heapq.heappop(active)[1]
    return found
