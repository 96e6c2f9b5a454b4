"""Simpler predictions of a plan's step, for comparison: RLinf's linear rule, and ReaL's costs without communication.

RLinf (`toolkits/auto_placement/node.py`) takes the time of each component on all ranks and scales it with their number;
where fewer ranks compute, training and inference are taken as more efficient by 1 + min(0.9, max(s / 10, 0.1)), s being
all ranks over those of the component, sampling as not. It knows no memory. ReaL's search prices communication at zero
(`realhf/search_engine/estimate.py`, `comm_cost`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.curves import MachineCurves
from hybrid_rlhf.planning.plans import LEARNERS, StepPlan
from hybrid_rlhf.planning.step_time import step_time


def linear_rule(flattened_seconds: Mapping[str, float], plan: StepPlan, *, ranks: int) -> float:
    """Seconds of a step by RLinf's rule.

    Args:
        flattened_seconds: measured by phase with all roles on all ranks: generation, scoring, training.
        plan: without a policy lag components run one after the other, with one at the same time.
        ranks: of the run.
    """
    frozen = [name for name in plan.roles if name not in (*LEARNERS, "sampler")]
    reading = {rank for name in frozen for rank in plan.roles[name].ranks}
    training = {rank for name in LEARNERS if name in plan.roles for rank in plan.roles[name].ranks}
    parts = {
        "generation": (len(plan.sampling.ranks), False),
        "scoring": (len(reading or training), True),
        "training": (len(training), True),
    }
    seconds = {name: _scaled(flattened_seconds[name], ranks / own, gains=gains) for name, (own, gains) in parts.items()}
    return max(seconds.values()) if plan.policy_lag else sum(seconds.values())


def without_communication(costs: Costs, plan: StepPlan, *, rows_at_once: int) -> float:
    """Seconds of a step where communication takes no time, as in ReaL's search."""
    curves, cluster = silent(costs.curves), costs.cluster
    return step_time(Costs(costs.job, curves, cluster), plan, rows_at_once=rows_at_once).step_seconds


def silent(curves: MachineCurves) -> MachineCurves:
    """A machine whose collectives and gathers take no time."""
    return replace(curves, corrections={**curves.corrections, "collective": 0.0}, gathered={})


def _scaled(seconds: float, scale: float, *, gains: bool) -> float:
    linear = seconds * scale
    if not gains or scale == 1:
        return linear
    return linear / (1 + min(0.9, max(scale / 10, 0.1)))
