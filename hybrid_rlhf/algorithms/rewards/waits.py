"""How long to wait before a part of the reward is tried again."""

from __future__ import annotations

FIRST_WAIT_SECONDS = 0.5
"""Before the first retry; it doubles with each."""
LONGEST_WAIT_SECONDS = 30.0


def wait_seconds(tries: int) -> float:
    """The wait after so many tries."""
    return min(FIRST_WAIT_SECONDS * 2.0 ** (tries - 1), LONGEST_WAIT_SECONDS)
