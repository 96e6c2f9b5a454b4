"""How wrong a prediction was: predicted next to measured seconds and bytes, phase by phase."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybrid_rlhf.planning.curves import Kind
from hybrid_rlhf.planning.phase_memory import PhaseMemory

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
    """Bytes by timed phase, of the rank that was planned lowest."""

    @classmethod
    def of(
        cls,
        predicted_seconds: Mapping[str, float],
        measured_seconds: Mapping[str, float],
        *,
        memory: Mapping[str, PredictionError] | None = None,
    ) -> PredictionReport:
        """The errors of what is both predicted and measured; `memory` is that of `memory_errors`."""
        compared = {
            name: PredictionError(value, measured_seconds[name])
            for name, value in predicted_seconds.items()
            if name in measured_seconds
        }
        return cls(compared, memory or {})

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl: predictions and their relative errors."""
        found: dict[str, float] = {}
        for phase, error in self.seconds.items():
            found[f"placement/predicted_{phase}_seconds"] = error.predicted
            found[f"placement/{phase}_seconds_error"] = error.relative
        for phase, error in self.memory.items():
            found[f"placement/{phase}_memory_error"] = error.relative
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


def memory_errors(planned: Iterable[PhaseMemory], peaks: Sequence[Mapping[str, float]]) -> dict[str, PredictionError]:
    """Errors of the memory of each timed phase, of the rank whose plan is lowest relative to its peak.

    Args:
        planned: the phases of all ranks; the updates of actor and critic are timed together.
        peaks: GiB of each rank by timed phase; (): they were not measured.
    """
    needs: dict[tuple[str, int], float] = {}
    for each in planned:
        for rank in each.ranks:
            key = each.timed_as, rank
            needs[key] = max(needs.get(key, 0.0), each.total)
    found: dict[str, PredictionError] = {}
    for (phase, rank), need in needs.items():
        if rank < len(peaks) and phase in peaks[rank]:
            error = PredictionError(need, peaks[rank][phase] * 2**30)
            if phase not in found or error.relative < found[phase].relative:
                found[phase] = error
    return found
