"""What a run bears and what ends it."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rlhf.configs.errors import UserError


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """What a run bears, and what ends it."""

    phase_timeout_seconds: float = 1800.0
    """Longest phase (generation, scoring, training, a save) in seconds; a longer one ends the run, with the stacks of
    all ranks in its stacks folder. 0: no limit."""
    max_skipped_steps: int = 3
    """Steps in a row skipped because a gradient, score or log-prob was not finite, that end the run; 0: any number."""

    @property
    def collective_timeout_seconds(self) -> float:
        """Longest collective: longer than a phase, so that the watchdog speaks first."""
        return self.phase_timeout_seconds + 120 if self.phase_timeout_seconds else 1e8

    def __post_init__(self) -> None:
        if not 0 <= self.phase_timeout_seconds < 1e8:
            raise UserError(
                "faults.phase_timeout_seconds must be 0 (never) or a number of seconds, got "
                f"{self.phase_timeout_seconds}: give for example 1800"
            )
        if self.max_skipped_steps < 0:
            raise UserError(
                f"faults.max_skipped_steps must be 0 (never) or more, got {self.max_skipped_steps}: raise it"
            )
