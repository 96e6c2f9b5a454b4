"""Memory of each phase in a report: planned, and measured where the device tells phases apart."""

from __future__ import annotations

import logging
from typing import Any, cast

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.memory.plan import AnyStep, Planner, own_device
from hybrid_rlhf.models.pretrained.folders import first_line
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.run import Run

logger = logging.getLogger(LOGGER_NAME)


def memory_by_phase(run: Run) -> list[dict[str, Any]]:
    """Planned and measured GiB of a rank, by phase; [] where the run cannot be planned, or its ranks hold different
    roles.

    Measured is the peak of the timed block that a phase belongs to, on this rank's GPU: `actor training` and `critic
    training` are one block, so both show the peak of both. On a CPU there is none: the peak of a process cannot be
    taken apart.
    """
    config = cast(AnyStep, run.config)
    if isinstance(config, RLConfig) and config.placement not in (None, "flattening"):
        return []
    try:
        planned = Planner(own_device(run.world.size, local=run.world.local_size)).phases(config)
    except (UserError, MemoryError, RuntimeError, OSError) as fault:  # a plan must not cost the report
        logger.info("report: no memory plan (%s)", first_line(fault))
        return []
    measured = run.timers.peaks_gib
    return [
        {
            "phase": phase.name,
            "planned_gib": phase.total / 2**30,
            "measured_gib": measured.get(phase.name.split()[-1]),
        }
        for phase in planned
    ]
