"""Events of tasks on ranks: when each begins and ends, where ranks share cores.

A task occupies lanes, each a sequence of tasks on a rank: the main thread, or the thread that samples ahead. It begins
when the tasks before it in all its lanes have ended, and those it waits for; compute first, then wire. While several
lanes of a rank or several ranks of a CPU host compute, each is slower, so tasks progress at rates that change at every
event.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_rlhf.placement.costs import Work
from hybrid_rlhf.placement.curves import MachineCurves
from hybrid_rlhf.placement.plans import Cluster

_DONE = 1e-12
"""Seconds below which nothing is left."""


@dataclass(frozen=True)
class Task:
    """Work of a phase on some ranks at once."""

    phase: str
    ranks: tuple[int, ...]
    work: Work
    step: int = 0
    after: tuple[int, ...] = ()
    """Positions of the tasks that must have ended, besides those before it in its lanes."""
    lane: str = "main"
    role: str = ""


@dataclass(frozen=True)
class Span:
    """When a task ran."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When all tasks ran."""

    spans: tuple[Span, ...]
    """In the order of the tasks."""
    ranks: int

    @property
    def end(self) -> float:
        """When the last ended."""
        return max((span.end for span in self.spans), default=0.0)

    def steps(self, first: int, last: int) -> float:
        """Mean seconds of the steps after the first one up to the last, by their ends."""
        ends = {step: max(span.end for span in self.spans if span.task.step == step) for step in (first, last)}
        return (ends[last] - ends[first]) / (last - first)

    def phase_seconds(self, step: int) -> dict[str, float]:
        """Seconds of each phase of a step, from its first beginning to its last end, gaps left out."""
        found: dict[str, float] = {}
        for phase in dict.fromkeys(span.task.phase for span in self.spans):
            spans = sorted((s.start, s.end) for s in self.spans if s.task.phase == phase and s.task.step == step)
            reached = -math.inf
            for start, end in spans:
                found[phase] = found.get(phase, 0.0) + max(0.0, end - max(start, reached))
                reached = max(reached, end)
        return found

    def idle_parts(self, step: int) -> dict[str, float]:
        """Part of the ranks' time that is idle while each phase of a step runs."""
        found = {}
        for phase in dict.fromkeys(span.task.phase for span in self.spans):
            own = [s for s in self.spans if s.task.phase == phase and s.task.step == step]
            if not own:
                continue
            start, end = min(s.start for s in own), max(s.end for s in own)
            if end <= start:
                continue
            busy = 0.0
            for rank in range(self.ranks):
                within = sorted(
                    (max(s.start, start), min(s.end, end))
                    for s in self.spans
                    if rank in s.task.ranks and s.end > start and s.start < end
                )
                reached = start
                for left, right in within:
                    busy += max(0.0, right - max(left, reached))
                    reached = max(reached, right)
            found[phase] = 1 - busy / ((end - start) * self.ranks)
        return found


def simulate(tasks: Sequence[Task], curves: MachineCurves, cluster: Cluster) -> Timeline:
    """Run tasks in their order on every lane."""
    return _Simulation(tasks, curves, cluster).run()


Lane = tuple[int, str]
"""A rank, and the thread on it."""


@dataclass
class _Running:
    """A task under way."""

    place: int
    start: float
    compute: float
    wire: float
    hosts: dict[int, int]
    """Lanes of this task on each host."""


class _Simulation:
    """The state of a simulation between two events."""

    def __init__(self, tasks: Sequence[Task], curves: MachineCurves, cluster: Cluster) -> None:
        self._tasks, self._curves, self._cluster = tasks, curves, cluster
        self._queues: dict[Lane, deque[int]] = defaultdict(deque)
        """Tasks of each lane that have not ended."""
        self._followers: dict[int, list[int]] = defaultdict(list)
        for place, task in enumerate(tasks):
            for rank in task.ranks:
                self._queues[rank, task.lane].append(place)
            for other in task.after:
                self._followers[other].append(place)
        self._missing = [len(task.ranks) + len(task.after) for task in tasks]
        """Lanes that are not free for a task yet, and tasks that it waits for."""
        self._ready: list[int] = [place for place, missing in enumerate(self._missing) if not missing]
        self._running: list[_Running] = []
        self._now = 0.0

    def run(self) -> Timeline:
        """Go from event to event until all tasks have ended."""
        spans: dict[int, Span] = {}
        for queue in self._queues.values():
            self._approach(queue[0])
        while self._ready or self._running:
            for place in self._ready:
                task = self._tasks[place]
                hosts = Counter(rank // self._cluster.ranks_per_host for rank in task.ranks)
                self._running.append(_Running(place, self._now, task.work.compute, task.work.wire, hosts))
            self._ready.clear()
            self._now += self._progress()
            for done in [run for run in self._running if run.compute <= _DONE and run.wire <= _DONE]:
                self._running.remove(done)
                spans[done.place] = Span(self._tasks[done.place], done.start, self._now)
                self._end(done.place)
        return Timeline(tuple(spans[place] for place in range(len(self._tasks))), self._cluster.ranks)

    def _approach(self, place: int) -> None:
        """One thing less that a task waits for."""
        self._missing[place] -= 1
        if not self._missing[place]:
            self._ready.append(place)

    def _end(self, place: int) -> None:
        for follower in self._followers[place]:
            self._approach(follower)
        task = self._tasks[place]
        for rank in task.ranks:
            queue = self._queues[rank, task.lane]
            queue.popleft()
            if queue:
                self._approach(queue[0])

    def _progress(self) -> float:
        """Seconds to the next end of compute or of a task; all progress by that time."""
        computing = [run for run in self._running if run.compute > _DONE]
        waiting = [run for run in self._running if run.compute <= _DONE]
        slowed = self._slowdowns(computing)
        ends = [run.compute * slow for run, slow in zip(computing, slowed, strict=True)]
        step = min(ends + [run.wire for run in waiting])
        for run in waiting:
            run.wire = max(0.0, run.wire - step)
        for run, slow in zip(computing, slowed, strict=True):
            run.compute = max(0.0, run.compute - step / slow)
        return step

    def _slowdowns(self, computing: list[_Running]) -> list[float]:
        """How many times longer each task's compute takes now."""
        if self._curves.device == "cpu":
            on_host = sum((Counter(run.hosts) for run in computing), Counter[int]())
            return [max((self._curves.slowed(on_host[host]) for host in run.hosts), default=1.0) for run in computing]
        if len({self._tasks[run.place].lane for run in computing}) <= 1:
            return [1.0] * len(computing)  # tasks of one lane share no rank
        lanes = Counter(rank for run in computing for rank in self._tasks[run.place].ranks)
        return [float(max((lanes[rank] for rank in self._tasks[run.place].ranks), default=1)) for run in computing]
