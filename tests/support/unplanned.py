"""Reports of runs without the memory plan, which takes a fifth of a short run's processor time.

The fork server imports this, and pytest once it has collected tests that train; `measured` runs keep the plan, and the
tests of the report and of the planner read it.
"""

from __future__ import annotations

from typing import Any

from hybrid_rlhf.loop.report import content
from hybrid_rlhf.runtime.run import Run


def no_phases(run: Run) -> list[dict[str, Any]]:
    """As for a run that cannot be planned."""
    return []


content.memory_by_phase = no_phases
