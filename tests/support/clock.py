"""A clock that a test moves."""

from __future__ import annotations


class ManualClock:
    """Returns the seconds that it has been given."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds
