"""Memory of each phase in a report: planned, and measured on devices that distinguish phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import in_words
from hybrid_rlhf.models.pretrained.folders import first_line
from hybrid_rlhf.planning.device import own_device
from hybrid_rlhf.planning.micro_batches import with_chosen_size
from hybrid_rlhf.planning.phase_memory import AnyStep, PhaseMemory
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.run import Run


def memory_by_phase(run: Run) -> list[dict[str, Any]]:
    """Planned and measured GiB by phase, for each set of ranks with the same roles; [] if the run cannot be planned, or
    has not placed its roles.

    The measured value is the peak of the timed phase that a phase belongs to, on the GPU with the highest:
    `actor training` and `critic training` are timed together, so both show the peak of both. On a CPU there is none, as
    the peak of a process cannot be divided into phases.
    """
    try:
        planned = _planned(run)
    except (UserError, MemoryError, RuntimeError, OSError) as fault:  # without a plan, the report is still written
        logger.info("report: no memory plan (%s)", first_line(fault))
        return []
    peaks = run.peaks or [run.timers.peaks_gib]
    rows = []
    for phase in planned:
        of_ranks = [peaks[rank].get(phase.timed_as) for rank in phase.ranks if rank < len(peaks)]
        rows.append(
            {
                "phase": phase.name,
                "ranks": in_words(phase.ranks),
                "planned_gib": phase.total / 2**30,
                "measured_gib": max((peak for peak in of_ranks if peak is not None), default=None),
            }
        )
    return rows


def _planned(run: Run) -> Sequence[PhaseMemory]:
    world = run.world
    planner = Planner(own_device(world.size, local=world.local_size))
    if run.placed is not None:
        config, placement = run.placed
        return planner.memory(cast(RLConfig, config), placement)
    if isinstance(run.config, RLConfig):
        return []
    return planner.phases(with_chosen_size(cast(AnyStep, run.config), run))
