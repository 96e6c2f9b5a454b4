"""Progress log of one-time work on a GPU: compiling kernels and capturing CUDA graphs.

Both happen when first needed, so the first steps of a run are slow, and without log lines they look hung.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from hybrid_rlhf.functional.triton_language import triton
from hybrid_rlhf.runtime.observability.logs import logger

LINE_SECONDS = 5.0
"""Minimum time between two log lines."""


class PreparationLog:
    """Counts events and logs their number and total time: at the first, at the last, and every few seconds between.

    `add` may be called in any thread.
    """

    def __init__(self, what: str, *, most: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with a count of 0.

        Args:
            what: text of the log line, such as "CUDA graphs captured".
            most: maximum number of events; none: unknown.
            clock: returns the time in seconds.
        """
        self._what = what
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._done = 0
        self._seconds = 0.0
        self._next = clock()

    def add(self, seconds: float) -> None:
        """Count one event that took `seconds` seconds."""
        with self._lock:
            self._done += 1
            self._seconds += seconds
            now = self._clock()
            last = self._done == self._most
            if now < self._next and not last:
                return
            self._next = now + LINE_SECONDS
        of = "" if self._most is None else f" of at most {self._most}"
        logger.info("%s: %d%s, %.1f s in all", self._what, self._done, of, self._seconds)


@functools.cache
def log_compilation() -> None:
    """From now on, log the kernels that Triton compiles in this process. Kernels from its disk cache are not
    counted."""
    knobs = triton.knobs
    log = PreparationLog("GPU kernels compiled")
    previous_listener = knobs.compilation.listener

    def compiled(*, times: Any, cache_hit: bool, **details: Any) -> None:
        if not cache_hit:
            log.add(times.total / 1e6)
        if previous_listener is not None:
            previous_listener(times=times, cache_hit=cache_hit, **details)

    knobs.compilation.listener = compiled
