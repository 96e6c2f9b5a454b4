"""Progress of long work as log lines: items done, speed, and estimated remaining time.

They are lines instead of a bar, so that log files and batch systems show them too. Work of less than five seconds logs
nothing. Lines appear every five seconds in the first minute and every thirty seconds after five minutes. Work that
every step of a loop repeats logs from thirty seconds on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from hybrid_rlhf.runtime.observability.logs import logger

T = TypeVar("T")
FIRST_SECONDS = 5.0
"""Time until the first line, and shortest interval between lines."""
STEP_SECONDS = 30.0
"""The same for work that every step of a loop repeats."""
_MAX_SECONDS = 30.0
_GROWTH = 0.1
"""Between these limits, the interval is this fraction of the time since the start."""


class ProgressLog:
    """Counts finished items; only the logger of the main rank shows it."""

    def __init__(
        self,
        what: str,
        *,
        total: int | None,
        unit: str = "rows",
        on_advance: Callable[[], None] | None = None,
        first_seconds: float | None = None,
        estimates_from: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            what: name of the work.
            total: number of items; None: unknown.
            unit: name of the counted items, in the plural.
            on_advance: called at every advance.
            first_seconds: time until the first line, and shortest interval between lines; None: 5.
            estimates_from: fraction of the items from which on the remaining time is estimated.
            clock: function that returns seconds.
        """
        self._what = what
        self._total = total
        self._unit = unit
        self._on_advance = on_advance
        self._clock = clock
        self._done = 0
        self._start = clock()
        self._estimates_from = estimates_from
        self._first_seconds = FIRST_SECONDS if first_seconds is None else first_seconds
        self._next = self._start + self._first_seconds
        self._has_logged = False

    def advance(self, count: int = 1) -> None:
        """Count finished items. Takes a few microseconds."""
        self._done += count
        if self._on_advance is not None:
            self._on_advance()
        is_last = count > 0 and self._done == self._total
        if self._clock() >= self._next:
            self._has_logged = True
            if not is_last:
                self._log()
        if is_last:
            self.end()

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate over items; each is counted when the next one is requested."""
        for item in items:
            yield item
            self.advance()
        if self._done != self._total:
            self.end()

    def end(self) -> None:
        """Log the total, if any line has been logged."""
        if self._has_logged:
            seconds = self._clock() - self._start
            logger.info("%s: %s %s in %.0f s", self._what, f"{self._done:,}", self._unit, seconds)

    def _log(self) -> None:
        now = self._clock()
        seconds = now - self._start
        self._next = now + min(max(self._first_seconds, _GROWTH * seconds), _MAX_SECONDS)
        speed = self._done / seconds
        of = ""
        left = ""
        if self._total is not None:
            of = f" of {self._total:,}"
            if speed and self._done >= self._estimates_from * self._total:
                left = f", {(self._total - self._done) / speed:.0f} s left"
        rate = f"{speed:,.0f}" if speed >= 1000 else f"{speed:.3g}"
        logger.info("%s: %s%s %s, %s %s/s%s", self._what, f"{self._done:,}", of, self._unit, rate, self._unit, left)
