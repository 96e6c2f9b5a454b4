"""What a run bears and what ends it."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rlhf.configs.errors import UserError


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """What ends a run that hangs."""

    phase_timeout_seconds: float = 1800.0
    """Longest phase (generation, scoring, training, a save) in seconds; then stacks are written and it ends; 0: any."""
    max_skipped_steps: int = 3
    """Steps in a row skipped because a gradient, score or log-prob was not finite, that end the run; 0: any number."""

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
