"""Config of an environment: what answers the actor between its turns, and judges them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid_rlhf.configs.rules import is_plain, require


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What the actor speaks with in a rollout (docs/environments.md)."""

    path: str | None = None
    """Class with reset and step, as module:Class or path/to/file.py:Class; none: an answer is a single turn."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class, by name."""
    max_turns: int = 8
    """Turns of the actor in an episode, at most; rollout.max_new_tokens bounds all that follows the prompt."""
    max_turn_tokens: int | None = None
    """Longest turn of the actor, in tokens; none: what is left of rollout.max_new_tokens."""
    max_observation_tokens: int = 256
    """Longer observations are cut to this many tokens."""
    timeout_seconds: float = 60.0
    """Longest call of reset or step, in seconds."""
    on_failure: Literal["stop", "zero"] = "stop"
    """Of an environment that raises, takes too long or answers what is no step. stop: it ends the run; zero: it ends
    the episode, whose last turn then earns nothing."""

    def __post_init__(self) -> None:
        require(
            self.path is None or all(self.path.rpartition(":")),
            f"environment.path is module:Class or path/to/file.py:Class, got {self.path!r}: write it so",
        )
        for name in ("max_turns", "max_turn_tokens", "max_observation_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"environment.{name} must be 1 or more, got {value}: raise it")
        require(
            0 < self.timeout_seconds < math.inf,
            f"environment.timeout_seconds must be above 0, got {self.timeout_seconds}: raise it",
        )
        require(
            is_plain(self.options),
            f"environment.options are names with texts, numbers, lists and mappings, got {self.options}: quote the "
            "others",
        )
        require(
            self.path is not None or not self.options,
            f"environment.options are arguments of a class, got {self.options} and no environment.path: give the path",
        )
