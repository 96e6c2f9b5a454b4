"""A clock that a test moves, and waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


class ManualClock:
    """Returns the seconds that it has been given."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def wait_until(holds: Callable[[], object], what: str = "a condition", *, seconds: float = 60.0) -> None:
    """Return when a condition holds; an assertion fails if it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.05)
