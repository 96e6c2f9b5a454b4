"""What a verifier says of a completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from hybrid_rlhf.loop.user_code import describe_error

Outcome = Literal["right", "wrong", "no_answer", "error", "timeout"]
OUTCOMES: tuple[Outcome, ...] = ("wrong", "no_answer", "error", "timeout")
"""Reasons of a score below 1, which are metrics."""


class Verdict(NamedTuple):
    """Score of a completion, with its reason."""

    score: float
    outcome: Outcome
    """right: the score is 1; otherwise the reason why it is not."""
    detail: str = ""
    """What the program said, in one line."""


class BadRow(ValueError):
    """A row has nothing to compare with: its column is invalid, or the verifier itself does not run."""


def failure_of(error: Exception) -> BadRow:
    """The failure of a row for an exception of its column or of the sandbox."""
    return error if isinstance(error, BadRow) else BadRow(f"the sandbox fails: {describe_error(error)}")


Judgement = Verdict | BadRow
Map = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""Results of a function of each item, computed by the workers."""
Verifier = Callable[[Sequence[str], Sequence[Any], Map], list[Judgement]]
"""Judges completions by the values of the column, none of which is None."""
