"""The metrics of a run so far, in the form that rules read."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from fractions import Fraction

RESERVED = ("step", "time_seconds")
"""Entries of a line of metrics.jsonl that are not metrics."""


class Curves:
    """The values of each metric, in the order of their steps."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._sums: dict[str, list[Fraction]] = {}
        """Prefix sums of the values of each metric, exact because rules compare means that may be equal."""
        self._peaks: dict[str, tuple[float, int]] = {}
        """Largest value of each metric, and the index of its first occurrence."""
        self.step = 0
        """The last step."""
        self.not_finite: tuple[str, ...] = ()
        """Metrics of the last step that are NaN or infinite; curves exclude them."""

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        values = {name: value for name, value in metrics.items() if name not in RESERVED}
        self.step = step
        self.not_finite = tuple(name for name, value in values.items() if not math.isfinite(value))
        for name, value in values.items():
            if math.isfinite(value):
                points = self._points.setdefault(name, [])
                if not points or value > self._peaks[name][0]:
                    self._peaks[name] = value, len(points)
                points.append((step, value))

    @property
    def names(self) -> Sequence[str]:
        """Names of all metrics."""
        return list(self._points)

    def count(self, name: str) -> int:
        """Number of values; 0 for a metric that the run does not have."""
        return len(self._points.get(name, ()))

    def first(self, name: str, count: int) -> list[float]:
        """The first `count` values, or all if there are fewer."""
        return [value for _, value in self._points.get(name, ())[:count]]

    def last(self, name: str, count: int) -> list[float]:
        """The last `count` values, or all if there are fewer."""
        return [value for _, value in self._points.get(name, ())[-count:]]

    def value(self, name: str) -> float:
        """The last value; NaN without one."""
        return next(iter(self.last(name, 1)), math.nan)

    def since_peak(self, name: str) -> int:
        """Number of values since the largest, itself included; 0 without one."""
        return self.count(name) - self._peaks[name][1] if name in self._peaks else 0

    def rise(self, name: str, since: int) -> Fraction:
        """The mean of the second half of the values from a step on minus that of the first half; 0 for less than two.

        Rules ask at every step, so the values are not added up each time.
        """
        points = self.points(name)
        sums = self._sums.setdefault(name, [Fraction()])
        for _, value in points[len(sums) - 1 :]:
            sums.append(sums[-1] + Fraction(value))
        start = bisect_left(points, since, key=lambda point: point[0])
        end = len(points)
        middle = start + (end - start) // 2
        if middle == start:
            return Fraction()
        return (sums[end] - sums[middle]) / (end - middle) - (sums[middle] - sums[start]) / (middle - start)

    def points(self, name: str) -> Sequence[tuple[int, float]]:
        """Steps and values of a metric."""
        return self._points.get(name, ())
