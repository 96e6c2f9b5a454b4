"""How wrong a prediction was: predicted next to measured seconds and bytes, phase by phase."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid_rlhf.placement.curves import Kind

KINDS_OF_PHASES: Mapping[str, tuple[Kind, ...]] = {
    "weight_sync": ("weight_sync",),
    "generation": ("prefill", "decode"),
    "scoring": ("forward",),
    "training": ("forward", "backward", "optimizer"),
}
"""Kinds of work that a phase consists of; communication is part of all."""
STEP = "step"


@dataclass(frozen=True)
class PredictionError:
    """A prediction next to its measurement."""

    predicted: float
    measured: float

    @property
    def relative(self) -> float:
        """Predicted over measured, less 1; above 0: predicted too much."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


@dataclass(frozen=True)
class PredictionReport:
    """Errors of a plan's predictions."""

    seconds: Mapping[str, PredictionError]
    """By phase, and of the whole step as `step`; phases that were not measured are left out."""
    memory: Mapping[str, PredictionError]
    """Bytes by phase."""

    @classmethod
    def of(
        cls,
        predicted_seconds: Mapping[str, float],
        measured_seconds: Mapping[str, float],
        *,
        predicted_bytes: Mapping[str, float] | None = None,
        measured_bytes: Mapping[str, float] | None = None,
    ) -> PredictionReport:
        """The errors of what is both predicted and measured."""
        return cls(
            _compared(predicted_seconds, measured_seconds), _compared(predicted_bytes or {}, measured_bytes or {})
        )

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl: predictions and their relative errors."""
        found: dict[str, float] = {}
        for phase, error in self.seconds.items():
            found[f"placement/predicted_{phase}_seconds"] = error.predicted
            found[f"placement/{phase}_seconds_error"] = error.relative
        for phase, error in self.memory.items():
            found[f"placement/{phase.replace(' ', '_')}_memory_error"] = error.relative
        return found

    def lines(self) -> list[str]:
        """A table."""
        lines = [f"{'phase':20}{'predicted':>12}{'measured':>12}{'error':>9}"]
        for unit, scale, errors in (("s", 1.0, self.seconds), ("GiB", 2.0**30, self.memory)):
            for phase, error in errors.items():
                values = f"{error.predicted / scale:>12.3f}{error.measured / scale:>12.3f}"
                lines.append(f"{phase:20}{values}{error.relative:>+9.1%} {unit}")
        return lines

    def ratios(self) -> dict[str, float]:
        """Measured over predicted by kind of work, for MachineCurves.corrected; of a kind in several phases, the
        mean."""
        by_kind: dict[str, list[float]] = {}
        for phase, error in self.seconds.items():
            for kind in KINDS_OF_PHASES.get(phase, ()):
                if error.predicted > 0 and error.measured > 0:
                    by_kind.setdefault(kind, []).append(error.measured / error.predicted)
        return {kind: statistics.geometric_mean(ratios) for kind, ratios in by_kind.items()}


def summary(reports: Sequence[PredictionReport], phase: str = STEP) -> dict[str, float]:
    """Errors of many runs: mean absolute, and that which nine of ten stay below.

    Raises:
        ValueError: when no report has the phase.
    """
    errors = sorted(abs(report.seconds[phase].relative) for report in reports if phase in report.seconds)
    if not errors:
        raise ValueError(f"no report has the phase {phase}")
    place = min(len(errors) - 1, int(0.9 * len(errors)))
    return {"mean_absolute_error": statistics.fmean(errors), "percentile_90_error": errors[place]}


def _compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, PredictionError]:
    return {name: PredictionError(value, measured[name]) for name, value in predicted.items() if name in measured}
