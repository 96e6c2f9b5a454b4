"""Memory of each phase in a report: planned, and measured where the device tells phases apart."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import in_words
from hybrid_rlhf.models.pretrained.folders import first_line
from hybrid_rlhf.planning.phase_memory import AnyStep, RankMemory, own_device
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.run import Run

logger = logging.getLogger(LOGGER_NAME)


def memory_by_phase(run: Run) -> list[dict[str, Any]]:
    """Planned and measured GiB by phase, of the ranks that hold the same roles; [] where the run cannot be planned,
    or has not placed its roles.

    Measured is the peak of the timed phase that a phase belongs to, of the GPU that takes most: `actor training` and
    `critic training` are timed together, so both show the peak of both. On a CPU there is none: the peak of a process
    cannot be taken apart.
    """
    try:
        planned = _planned(run)
    except (UserError, MemoryError, RuntimeError, OSError) as fault:  # a plan must not cost the report
        logger.info("report: no memory plan (%s)", first_line(fault))
        return []
    peaks = run.peaks or [run.timers.peaks_gib]
    found = []
    for each in planned:
        of_ranks = [peaks[rank].get(each.phase.timed_as) for rank in each.ranks if rank < len(peaks)]
        found.append(
            {
                "phase": each.phase.name,
                "ranks": in_words(each.ranks),
                "planned_gib": each.phase.total / 2**30,
                "measured_gib": max((peak for peak in of_ranks if peak is not None), default=None),
            }
        )
    return found


def _planned(run: Run) -> Sequence[RankMemory]:
    world = run.world
    planner = Planner(own_device(world.size, local=world.local_size))
    if run.placed is not None:
        config, placement = run.placed
        return planner.memory(cast(RLConfig, config), placement)
    if isinstance(run.config, RLConfig):
        return []
    phases = planner.phases(cast(AnyStep, run.config))
    return [RankMemory(tuple(range(world.size)), phase) for phase in phases]
