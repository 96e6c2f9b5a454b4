"""Progress of what a GPU does once before it generates at full speed: kernels are compiled, CUDA graphs captured.

Each is done when it is first needed, so the first steps of a run take longer. Without a line in the log they look hung.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from hybrid_rlhf.generation.ops.triton_language import triton
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME

LINE_SECONDS = 5.0
"""Between two lines, at least."""
logger = logging.getLogger(LOGGER_NAME)


class PreparationLog:
    """Counts what is done, and logs how many took how long: the first, the last, and between at most every few seconds.

    Any thread may count.
    """

    def __init__(self, what: str, *, most: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with none.

        Args:
            what: for a line, such as "CUDA graphs captured".
            most: how many there can be; none: unknown.
            clock: returns seconds.
        """
        self._what, self._most, self._clock, self._lock = what, most, clock, threading.Lock()
        self._done, self._seconds, self._next = 0, 0.0, clock()

    def add(self, seconds: float) -> None:
        """Count one that took so many seconds."""
        with self._lock:
            self._done += 1
            self._seconds += seconds
            now, last = self._clock(), self._done == self._most
            if now < self._next and not last:
                return
            self._next = now + LINE_SECONDS
        of = "" if self._most is None else f" of at most {self._most}"
        logger.info("%s: %d%s, %.1f s in all", self._what, self._done, of, self._seconds)


@functools.cache
def log_compilation() -> None:
    """Log from now on what Triton compiles in this process; kernels from its cache on disk are not counted."""
    knobs, log = triton.knobs, PreparationLog("GPU kernels compiled")
    others = knobs.compilation.listener

    def compiled(*, times: Any, cache_hit: bool, **given: Any) -> None:
        if not cache_hit:
            log.add(times.total / 1e6)
        if others is not None:
            others(times=times, cache_hit=cache_hit, **given)

    knobs.compilation.listener = compiled
