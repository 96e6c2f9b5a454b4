"""Runs without what takes a fifth of a short one's processor time and no test reads.

The fork server imports this, and pytest once it has collected tests that train. Tests of the report and of the planner
put the memory plan of a report back.
"""

from __future__ import annotations

import functools
from typing import Any

from deepspeed.utils import numa

from hybrid_rlhf.loop.report import content
from hybrid_rlhf.runtime.run import Run


def no_phases(run: Run) -> list[dict[str, Any]]:
    """As for a run that cannot be planned."""
    return []


content.memory_by_phase = no_phases
# ZeRO-3 starts `numactl` for each parameter
numa.get_numa_cores = functools.cache(numa.get_numa_cores)
