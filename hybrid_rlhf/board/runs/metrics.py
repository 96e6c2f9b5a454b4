"""The curves of a run: metrics.jsonl, read incrementally, and thinned out for a screen.

Thinning keeps the smallest and the largest value of each bucket of steps, so that no peak is lost.
"""

from __future__ import annotations

import os
import re
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.board.runs.reading import complete_lines, finite, number, parsed
from hybrid_rlhf.runtime.files.reading import open_regular

Floats = NDArray[np.float64]
_MOST_NAMES = 2000
_TIMELINE_POINTS = 500
_NOT_METRICS = ("step", "time_seconds")
_TIMELINE = re.compile("time/(?P<phases>.+)_seconds|memory/(?P<memory>.+)_gib")
_NOT_PHASES = ("time/step_seconds", "time/hidden_generation_seconds")
"""Metrics that are not phases: the sum of the phases, and concurrent work."""


class MetricsFile:
    """The metrics of one run, as columns; may be used by several threads."""

    def __init__(self, path: Path) -> None:
        """Take the file, which need not exist yet."""
        self._path = path
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._offset = 0
        self._inode = -1
        self._steps = array("q")
        self._times = array("d")
        self._columns: dict[str, array[float]] = {}
        self.problem: str | None = None

    def update(self) -> None:
        """Read the appended lines.

        A file that is shorter or was replaced, because a resumed run dropped its last lines, is read from the start.
        """
        with self._lock:
            try:
                with open_regular(self._path) as file:
                    file_status = os.fstat(file.fileno())
                    if file_status.st_ino != self._inode or file_status.st_size < self._offset:
                        self._clear()
                        self._inode = file_status.st_ino
                    for lines in complete_lines(file, self._offset):
                        for offset, line in lines:
                            self._add(offset, line)
                            self._offset = offset + len(line) + 1
            except FileNotFoundError:
                self._clear()
            except OSError as error:
                self.problem = f"{self._path.name} cannot be read ({error.strerror})"
            except ValueError as error:
                self.problem = f"{self._path.name}: {error}"

    def _add(self, offset: int, line: bytes) -> None:
        content = parsed(line)
        if content is None:
            self.problem = f"{self._path.name}: the line at byte {offset} is no JSON with a step"
            return
        rows = len(self._steps)
        self._steps.append(content["step"])
        self._times.append(number(content.get("time_seconds")))
        for name, value in content.items():
            if name in _NOT_METRICS or isinstance(value, str | list | dict):
                continue
            if name not in self._columns:
                if len(self._columns) >= _MOST_NAMES:
                    self.problem = f"{self._path.name} has more than {_MOST_NAMES} metrics: the others are not shown"
                    continue
                self._columns[name] = array("d", [np.nan]) * rows
            self._columns[name].append(number(value))
        for column in self._columns.values():
            if len(column) == rows:
                column.append(np.nan)

    def names(self) -> list[str]:
        """The names of the metrics, sorted."""
        with self._lock:
            return sorted(self._columns)

    def columns(
        self, names: Sequence[str], *, first: int | None = None, last: int | None = None
    ) -> tuple[NDArray[np.int64], Floats, dict[str, Floats]]:
        """Steps [n], seconds since the start [n], and the values [n] of the requested metrics that exist.

        `first` and `last` select steps; None selects all before or after.
        """
        with self._lock:
            steps = np.array(self._steps, np.int64)
            times = np.array(self._times)
            values = {name: np.array(self._columns[name]) for name in names if name in self._columns}
        selected = (steps >= (0 if first is None else first)) & (steps <= (2**31 if last is None else last))
        return steps[selected], times[selected], {name: value[selected] for name, value in values.items()}

    def series(self, names: Sequence[str], *, after: int | None, points: int) -> dict[str, Any]:
        """Curves of at most `points` points.

        Args:
            names: names of metrics; those that the run does not have are left out.
            after: select only later steps; None selects all.
            points: largest number of points.
        """
        steps, times, values = self.columns(names, first=None if after is None else after + 1)
        if len(steps) > points:
            starts = np.linspace(0, len(steps), max(points // 2, 1), endpoint=False).astype(np.int64)
            ends = np.append(starts[1:], len(steps)) - 1
            values = {name: _extremes(value, starts) for name, value in values.items()}
            places = np.stack([starts, ends], axis=1).ravel()
            steps = steps[places]
            times = times[places]
        return {
            "step": steps.tolist(),
            "time_seconds": [finite(value) for value in times],
            "values": {name: [finite(value) for value in column] for name, column in values.items()},
        }

    def timeline(self, first: int | None, last: int | None) -> dict[str, Any]:
        """Seconds of each phase, and memory, by step; means of neighbours if there are many steps."""
        shown = [match for name in self.names() if name not in _NOT_PHASES and (match := _TIMELINE.fullmatch(name))]
        names = [match[0] for match in shown]
        steps, _, values = self.columns(names, first=1 if first is None else first, last=last)
        if len(steps) > _TIMELINE_POINTS:
            starts = np.linspace(0, len(steps), _TIMELINE_POINTS, endpoint=False).astype(np.int64)
            steps = steps[starts]
            values = {name: _means(value, starts) for name, value in values.items()}
        parts: dict[str, dict[str, list[float | None]]] = {"phases": {}, "memory": {}}
        for match in shown:
            part = match.lastgroup or ""
            parts[part][match[part]] = [finite(value) for value in values.get(match[0], ())]
        return {"steps": steps.tolist(), **parts}


def _extremes(values: Floats, starts: NDArray[np.int64]) -> Floats:
    """The smallest and the largest value of each bucket [2 * buckets], the earlier one first."""
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    sizes = np.diff(np.append(starts, len(values)))
    bucket = np.repeat(np.arange(len(starts)), sizes)
    places = np.arange(len(values))
    where_low, where_high = (
        np.minimum.reduceat(np.where(values == extreme[bucket], places, len(values)), starts) for extreme in (low, high)
    )
    falls = (where_high < where_low)[:, None]
    return np.where(falls, np.stack([high, low], axis=1), np.stack([low, high], axis=1)).ravel()


def _means(values: Floats, starts: NDArray[np.int64]) -> Floats:
    present = np.isfinite(values)
    counts = np.add.reduceat(present.astype(float), starts)
    sums = np.add.reduceat(np.where(present, values, 0.0), starts)
    return np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
