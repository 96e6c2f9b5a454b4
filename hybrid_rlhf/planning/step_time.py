"""Seconds of an RL step under a plan: the sum of its phases on the ranks that take longest.

A step: weight sync, sampling, the all-gather of completions; reward models and reference read them, then actor and
critic; the updates; what the loop does on every rank besides. A rank works through its tasks in this order, and a task
begins when all its ranks are free, so a collective of all ranks ends a phase. Weights travel to a separate sampler
while the critic learns from the last mini-batch (engines/separate/sampler.py: sync_ahead). With a policy lag sampling
runs beside all other tasks, so in the long run a step takes the longer of both.

Ranks of a CPU host share its cores: compute is slowed by the mean number of ranks that compute between two points at
which all ranks wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hybrid_rlhf.planning.costs import Costs, Work
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.plans import StepPlan

PHASES = ("weight_sync", "generation", "gather", "scoring", "training", "loop")
"""Named as the metrics `time/*_seconds`; `gather` and `loop` are `time/other_seconds`."""


@dataclass(frozen=True)
class Task:
    """Work of a phase on some ranks at once."""

    phase: str
    ranks: tuple[int, ...]
    work: Work
    together: bool = False
    """All ranks do it together."""
    busy_part: float = 1.0
    """Mean part of the work that a rank has, where the ranks have unequal ones."""
    beside: bool = False
    """It begins after the tasks so far, and holds up none of its ranks."""


@dataclass(frozen=True)
class StepTime:
    """Predicted times of a step in the long run."""

    step_seconds: float
    phases: dict[str, float]
    """Seconds by phase; with a policy lag they overlap."""
    tasks: tuple[Task, ...]
    ranks: int

    def idle(self, phase: str) -> float:
        """Part of the ranks' time in a phase that is idle."""
        return self._idle(self.phases[phase], [task for task in self.tasks if task.phase == phase])

    @property
    def idle_part(self) -> float:
        """Part of the ranks' time in a step that is idle."""
        return self._idle(self.step_seconds, self.tasks)

    def wire_part(self, phase: str) -> float:
        """Part of the ranks' work in a phase that communication takes."""
        tasks = [task for task in self.tasks if task.phase == phase]
        total = sum(task.work.seconds * len(task.ranks) for task in tasks)
        return sum(task.work.wire * len(task.ranks) for task in tasks) / total if total else 0.0

    def _idle(self, seconds: float, tasks: Sequence[Task]) -> float:
        busy = sum(task.work.seconds * task.busy_part * len(task.ranks) for task in tasks)
        return max(0.0, 1 - busy / (seconds * self.ranks)) if seconds else 0.0


def step_time(costs: Costs, plan: StepPlan, *, rows_at_once: int) -> StepTime:
    """The time of a step in the long run.

    Args:
        costs: of the job on the machine.
        plan: what runs where.
        rows_at_once: completions that memory lets a sampling group decode together.
    """
    cluster = costs.cluster
    sync = Task("weight_sync", _with_samplers(plan), costs.weight_sync(plan))
    sampling = _sampling(costs, plan, rows_at_once)
    gather = Task("gather", cluster.everyone, costs.messages("gather"), together=True)
    loop = Task("loop", cluster.everyone, costs.loop(len(plan.sampling_groups)), together=True)
    rest = [*_reads(costs, plan), *_updates(costs, plan), loop]
    if not plan.policy_lag:
        stages = _stages([sync, sampling, gather, *rest], cluster.ranks)
        tasks = [slowed for stage in stages for slowed in _sharing(stage, costs)]
        seconds, phases = _in_turn(tasks)
        return StepTime(seconds, phases, tuple(tasks), cluster.ranks)
    sync, sampling, gather, *rest = _sharing([sync, sampling, gather, *rest], costs)
    seconds, phases = _in_turn([gather, sync, *rest])
    sampled, sampling_phases = _in_turn([sync, sampling])
    # the thread that samples shares its ranks with what they compute for other roles
    beside = {
        rank: sum(task.work.compute for task in rest if not task.together and rank in task.ranks)
        for rank in sampling.ranks
    }
    step_seconds = max(seconds, sampled + max(beside.values()))
    return StepTime(step_seconds, sampling_phases | phases, (sync, sampling, gather, *rest), cluster.ranks)


def _sampling(costs: Costs, plan: StepPlan, rows_at_once: int) -> Task:
    """The sampling of all groups, which takes as long as that of the slowest."""
    works = costs.sampling(plan, rows_at_once=rows_at_once)
    slowest = max(works, key=lambda work: work.seconds)
    mean = sum(work.seconds for work in works) / len(works)
    ranks = tuple(sorted(rank for group in plan.sampling_groups for rank in group))
    return Task("generation", ranks, slowest, busy_part=mean / slowest.seconds if slowest.seconds else 1.0)


def _reads(costs: Costs, plan: StepPlan) -> Iterator[Task]:
    job = costs.job
    everyone = costs.cluster.everyone
    for role in job.frozen:
        yield Task("scoring", plan.roles[role.name].ranks, costs.read(role, plan))
    if job.frozen:
        yield Task("scoring", everyone, costs.rows_to_read(), together=True)
    reads = {"actor": job.actor_reads(lag=plan.policy_lag), "critic": 1}
    for role in job.learners:
        if times := reads[role.name]:
            yield Task("scoring", plan.roles[role.name].ranks, costs.read(role, plan) * times)
    yield Task("scoring", everyone, costs.rows_to_read() + costs.values_read(), together=True)


def _updates(costs: Costs, plan: StepPlan) -> Iterator[Task]:
    """Those of actor and critic; they take turns on common ranks, so the actor's last is before the critic's last."""
    for role in costs.job.learners:
        ranks = plan.roles[role.name].ranks
        work = costs.updates(role, plan)
        yield Task("training", ranks, work)
    yield Task("training", costs.cluster.everyone, costs.rows_to_learn(), together=True)


def _with_samplers(plan: StepPlan) -> tuple[int, ...]:
    """The ranks of the actor and of all that sample."""
    return tuple(sorted({*plan.roles["actor"].ranks, *plan.sampling.ranks}))


def _stages(tasks: Sequence[Task], ranks: int) -> Iterator[list[Task]]:
    """Tasks up to each that all ranks share."""
    stage: list[Task] = []
    for task in tasks:
        stage.append(task)
        if len(task.ranks) == ranks:
            yield stage
            stage = []


def _sharing(stage: list[Task], costs: Costs) -> list[Task]:
    """Tasks, slowed by the ranks of a CPU host that compute in the stage."""
    curves = costs.curves
    cluster = costs.cluster
    if curves.device != "cpu":
        return stage
    computing = _computing(stage, cluster)

    def slowed(task: Task) -> Task:
        factor = max(curves.slowed(computing[cluster.host_of(rank)]) for rank in task.ranks)
        return replace(task, work=Work(task.work.compute * factor, task.work.wire))

    return [slowed(task) for task in stage]


def _computing(stage: Sequence[Task], cluster: Cluster) -> dict[int, float]:
    """Mean number of ranks of each host that compute, while the one with most does."""
    loads: dict[int, float] = defaultdict(float)
    busy: dict[int, float] = defaultdict(float)
    for task in stage:
        for rank in task.ranks:
            loads[rank] += task.work.compute
            busy[cluster.host_of(rank)] += task.work.compute * task.busy_part

    def most(host: int) -> float:
        return max(load for rank, load in loads.items() if cluster.host_of(rank) == host)

    return {host: total / most(host) if total else 1.0 for host, total in busy.items()}


def _in_turn(tasks: Sequence[Task]) -> tuple[float, dict[str, float]]:
    """When the last of the tasks ends that ranks do in this order, and the seconds of each phase."""
    free: dict[int, float] = defaultdict(float)
    begins: dict[str, float] = {}
    ends: dict[str, float] = {}
    last = 0.0
    for task in tasks:
        # what all ranks do together also waits for what runs beside their tasks
        start = last if task.together or task.beside else max(free[rank] for rank in task.ranks)
        end = start + task.work.seconds
        if not task.beside:
            free.update(dict.fromkeys(task.ranks, end))
        last = max(last, end)
        begins[task.phase] = min(start, begins.get(task.phase, start))
        ends[task.phase] = max(end, ends.get(task.phase, end))
    return last, {phase: end - begins[phase] for phase, end in ends.items()}
