"""The tasks of RL steps under a plan, in the order of the library's loop.

A step: weight sync, sampling by each tensor-parallel group, the all-gather of completions; reward models and reference
read them, then actor and critic; the updates; what the loop does on every rank besides. A rank that holds no role of a
phase goes on to its next task, and waits at the next collective of all ranks. Weights travel to a separate sampler
while the critic learns from the last mini-batch (engines/separate/sampler.py: sync_ahead). With a policy lag of k the
sampler's thread samples k rollouts ahead, from the weights of the beginning of the step at which it starts
(rl/rollouts/collector.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hybrid_rlhf.placement.costs import Costs, Work
from hybrid_rlhf.placement.job import RoleJob
from hybrid_rlhf.placement.plans import LEARNERS, StepPlan
from hybrid_rlhf.placement.simulation import Task, Timeline, simulate

PHASES = ("weight_sync", "generation", "gather", "scoring", "training", "loop")
"""Named as the metrics `time/*_seconds`; `gather` and `loop` are `time/other_seconds`."""
_STEADY_STEPS = 5
"""Steps after the first rollouts of an asynchronous run that are simulated; the last four are averaged."""
_MOST_GROUPS = 16
"""Sampling groups that are simulated one by one where ranks share no cores; of more, the slowest stands for all."""


@dataclass(frozen=True)
class StepTime:
    """Predicted times of a step in the long run."""

    step_seconds: float
    phases: dict[str, float]
    """Seconds by phase; with a policy lag they overlap."""
    idle: dict[str, float]
    """Part of the ranks' time that is idle, by phase that runs."""
    timeline: Timeline

    @property
    def idle_part(self) -> float:
        """Part of the ranks' time in a step that is idle."""
        busy = sum(s.task.work.seconds * len(s.task.ranks) for s in self.timeline.spans)
        return max(0.0, 1 - busy / (self.timeline.end * self.timeline.ranks)) if self.timeline.end else 0.0


def step_time(costs: Costs, plan: StepPlan, *, rows_at_once: int) -> StepTime:
    """Simulate enough steps of a plan to know the time of one in the long run.

    Args:
        costs: of the job on the machine.
        plan: what runs where.
        rows_at_once: completions that memory lets a sampling group decode together.
    """
    lag = plan.policy_lag
    steps = 1 if lag == 0 else lag + _STEADY_STEPS
    tasks = list(step_tasks(costs, plan, rows_at_once=rows_at_once, steps=steps))
    timeline = simulate(tasks, costs.curves, costs.cluster)
    seconds = timeline.end if lag == 0 else timeline.steps(steps - _STEADY_STEPS + 1, steps)
    return StepTime(seconds, timeline.phase_seconds(steps), timeline.idle_parts(steps), timeline)


def step_tasks(costs: Costs, plan: StepPlan, *, rows_at_once: int, steps: int) -> Iterator[Task]:
    """The tasks of the first steps of a run."""
    lag, everyone, place = plan.policy_lag, tuple(range(costs.cluster.ranks)), 0
    sampled: dict[int, tuple[int, ...]] = {}
    """Positions of the sampling tasks of each step."""
    rest = [*_reads(costs, plan), *_updates(costs, plan), _Piece("loop", "", everyone, costs.loop())]
    gather = costs.exchange(1.0, kind="all_gather")
    for step in range(1, steps + 1):
        if step not in sampled:
            tasks = list(_sampling(costs, plan, step, place, rows_at_once=rows_at_once, lane="main"))
            yield from tasks
            sampled[step], place = tuple(range(place + 1, place + len(tasks))), place + len(tasks)
        yield Task("gather", everyone, gather, step, sampled[step])
        place += 1
        for ahead in range(step + 1, min(step + lag, steps) + 1):
            if ahead not in sampled:
                tasks = list(_sampling(costs, plan, ahead, place, rows_at_once=rows_at_once, lane="sampling"))
                yield from tasks
                sampled[ahead], place = tuple(range(place + 1, place + len(tasks))), place + len(tasks)
        for piece in rest:
            after = tuple(place - back for back in piece.back)
            yield Task(piece.phase, piece.ranks, piece.work, step, after, piece.lane, piece.role)
            place += 1


def _sampling(costs: Costs, plan: StepPlan, step: int, place: int, *, rows_at_once: int, lane: str) -> Iterator[Task]:
    """A weight sync and the sampling of all groups after it; `place` is the position of the sync."""
    ranks = tuple(sorted({*plan.roles["actor"].ranks, *plan.sampling.ranks}))
    yield Task("weight_sync", ranks, costs.weight_sync(plan), step, role="actor")
    groups = list(zip(plan.sampling_groups, costs.sampling(plan, rows_at_once=rows_at_once), strict=True))
    if len(groups) > _MOST_GROUPS and costs.curves.device == "cuda":
        slowest = max((work for _, work in groups), key=lambda work: work.seconds)
        mean = sum((work.seconds for _, work in groups)) / len(groups) / max(slowest.seconds, 1e-12)
        # as many ranks as would be busy all the time, so that the idle part is the same
        sampling = [rank for group, _ in groups for rank in group]
        busy = max(1, round(mean * len(sampling)))
        groups = [(tuple(sampling[:busy]), slowest)]
    for group, work in groups:
        yield Task("generation", group, work, step, (place,), lane, "actor")


class _Piece(NamedTuple):
    """A task of what follows the completions."""

    phase: str
    role: str
    ranks: tuple[int, ...]
    work: Work
    back: tuple[int, ...] = ()
    """How many tasks before it are those that must have ended."""
    lane: str = "main"


def _reads(costs: Costs, plan: StepPlan) -> Iterator[_Piece]:
    job, everyone = costs.job, tuple(range(costs.cluster.ranks))
    reduced = costs.exchange(1.0, kind="all_reduce")
    for role in job.frozen:
        yield _Piece("scoring", role.name, plan.roles[role.name].ranks, costs.read(role, plan))
    if job.frozen:
        yield _Piece("scoring", "", everyone, reduced)
    reads = {"actor": job.actor_reads(lag=plan.policy_lag), "critic": 1}
    for role in _learners(costs):
        if reads[role.name]:
            work = costs.read(role, plan, times=reads[role.name])
            yield _Piece("scoring", role.name, plan.roles[role.name].ranks, work)
    yield _Piece("scoring", "", everyone, reduced)


def _updates(costs: Costs, plan: StepPlan) -> Iterator[_Piece]:
    """Those of actor and critic take turns on common ranks, so the actor's last is before the critic's last."""
    everyone, ahead = tuple(range(costs.cluster.ranks)), costs.transfer_ahead(plan)
    for role in _learners(costs):
        ranks, work = plan.roles[role.name].ranks, costs.updates(role, plan)
        if role.name == "critic" and ahead is not None:
            last = 1 / costs.job.updates
            yield _Piece("training", role.name, ranks, work * (1 - last))
            travels = tuple(sorted({*plan.roles["actor"].ranks, *plan.sampling.ranks}))
            yield _Piece("training", "actor", travels, ahead, (1, 2), "transfer")
            work = work * last
        yield _Piece("training", role.name, ranks, work)
    yield _Piece("training", "", everyone, Work(), () if ahead is None else (2,))


def _learners(costs: Costs) -> list[RoleJob]:
    return [costs.job.roles[name] for name in LEARNERS if name in costs.job.roles]
