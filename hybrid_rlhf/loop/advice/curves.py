"""The metrics of a run so far, in the form that rules read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

RESERVED = ("step", "time_seconds")
"""Entries of a line of metrics.jsonl that are not metrics."""


class Curves:
    """The values of each metric, in the order of their steps."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[int, float]]] = {}
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
                self._points.setdefault(name, []).append((step, value))

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

    def points(self, name: str) -> Sequence[tuple[int, float]]:
        """Steps and values of a metric."""
        return self._points.get(name, ())
