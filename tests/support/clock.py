"""A clock that a test moves, calls that wait for the test, and waiting for what another thread or process does.

Limits are those of a machine that is twenty times slower, or has as many things to do: only a test that fails waits for
them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ManualClock:
    """Returns the seconds that it has been given."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Gate:
    """A function whose calls wait until it is opened."""

    def __init__(self, call: Callable[..., Any]) -> None:
        """Take the function."""
        self._call = call
        self._begun = threading.Event()
        self._opened = threading.Event()

    def __call__(self, *given: Any) -> Any:
        self._begun.set()
        assert self._opened.wait(300)
        return self._call(*given)

    @contextmanager
    def held(self) -> Iterator[None]:
        """From the first call on, until the end of this block."""
        assert self._begun.wait(300)
        try:
            yield
        finally:
            self._opened.set()


def wait_until(holds: Callable[[], object], what: str = "a condition", *, seconds: float = 300.0) -> None:
    """Return when a condition holds; an assertion fails if it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.05)
