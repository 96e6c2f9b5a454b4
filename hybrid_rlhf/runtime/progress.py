"""Log lines that show that long work moves: how much of it is done, how fast, and how long the rest takes.

Plain lines and no bar, so that a log file and a batch system show them too. Work of less than five seconds says
nothing. Lines come every five seconds in the first minute and every thirty seconds after five minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from hybrid_rlhf.runtime.logs import LOGGER_NAME

T = TypeVar("T")
FIRST_SECONDS = 5.0
"""Until the first line, and between the next ones."""
_LONGEST_SECONDS = 30.0
_GROWTH = 0.1
"""In between a line waits for this share of the time since the start."""
logger = logging.getLogger(LOGGER_NAME)


class ProgressLog:
    """Counts what is done; only the main rank's logger shows it."""

    def __init__(
        self,
        what: str,
        *,
        total: int | None,
        unit: str = "rows",
        on_advance: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            what: names the work in the log.
            total: how much there is to do; none: unknown.
            unit: what is counted, in the plural.
            on_advance: called at every advance.
            clock: seconds.
        """
        self._what, self._total, self._unit, self._on_advance, self._clock = what, total, unit, on_advance, clock
        self._done = 0
        self._start = clock()
        self._next = self._start + FIRST_SECONDS
        self._has_spoken = False

    def advance(self, count: int = 1) -> None:
        """So much more is done. A few microseconds."""
        self._done += count
        if self._on_advance is not None:
            self._on_advance()
        if self._clock() >= self._next:
            self._speak()
        if count and self._done == self._total:
            self.end()

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Items, each counted when the next one is asked for."""
        for item in items:
            yield item
            self.advance()
        if self._done != self._total:
            self.end()

    def end(self) -> None:
        """All is done; says so where a line has been shown."""
        if self._has_spoken:
            seconds = self._clock() - self._start
            logger.info("%s: %s %s in %.0f s", self._what, f"{self._done:,}", self._unit, seconds)

    def _speak(self) -> None:
        now = self._clock()
        seconds = now - self._start
        self._next = now + min(max(FIRST_SECONDS, _GROWTH * seconds), _LONGEST_SECONDS)
        self._has_spoken = True
        speed = self._done / seconds
        of, left = "", ""
        if self._total is not None:
            of = f" of {self._total:,}"
            left = f", {(self._total - self._done) / speed:.0f} s left" if speed else ""
        logger.info("%s: %s%s %s, %.3g %s/s%s", self._what, f"{self._done:,}", of, self._unit, speed, self._unit, left)
