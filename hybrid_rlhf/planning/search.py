"""The best plan of each style: exhaustive search with pruning.

Layouts are looked at in the order of a lower bound of their step: each role with the fastest way to share its weights
that leaves room for the others, and the fastest sampling. Within a layout, plans are evaluated in the order of their
seconds with room for all completions, until none can be faster than the best one. Ways of a role that another one beats
in time and memory are left out. Memory is a hard constraint.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from hybrid_rlhf.configs.sections.placement import STYLES as NAMED_STYLES
from hybrid_rlhf.planning.candidates import (
    NOTHING,
    Layout,
    Offload,
    Sharding,
    lag_of,
    layouts,
    offloads,
    plan_of,
    samplings,
    shardings,
)
from hybrid_rlhf.planning.costs import Costs, Work
from hybrid_rlhf.planning.memo import once_for
from hybrid_rlhf.planning.placed_memory import MemoryModel, PlanMemory
from hybrid_rlhf.planning.plans import LEARNERS, SAMPLER, StepPlan
from hybrid_rlhf.planning.step_time import StepTime, step_time
from hybrid_rlhf.runtime.placement import CRITIC_COPY

STYLES = (*NAMED_STYLES, "hybrid")


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted memory and, where it fits and its time can be predicted, that too."""

    plan: StepPlan
    memory: PlanMemory
    time: StepTime | None = None

    @classmethod
    def of(cls, costs: Costs, memory: MemoryModel, plan: StepPlan) -> Candidate:
        """A plan with the micro-batches of a job, predicted; the time with a copy of the critic is not."""
        plan = replace(plan, micro_batch_tokens=costs.job.config.train.micro_batch_tokens)
        need = memory(plan)
        if need.misfit is not None or CRITIC_COPY in plan.roles:
            return cls(plan, need)
        return cls(plan, need, step_time(costs, plan, rows_at_once=need.rows_at_once))

    @property
    def fits(self) -> bool:
        """True if every rank has the memory for it."""
        return self.memory.misfit is None

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite where it does not fit."""
        return math.inf if self.time is None else self.time.step_seconds


@dataclass(frozen=True)
class SearchResult:
    """The best plans."""

    ranked: tuple[Candidate, ...]
    """The best plan of each style, fastest first; of a style without a plan that fits, the one nearest to fitting."""
    evaluated: int
    """Plans whose memory was checked."""
    fastest: tuple[Candidate, ...]
    """All plans that fit, fastest first."""

    @property
    def best(self) -> Candidate | None:
        """The fastest plan; none if no plan fits."""
        return self.ranked[0] if self.ranked and self.ranked[0].time is not None else None

    def merged(self, other: SearchResult) -> SearchResult:
        """The better plan of each style of two results."""
        best: dict[str, Candidate] = {}
        for each in sorted((*self.ranked, *other.ranked), key=_order):
            best.setdefault(each.plan.placement.style, each)
        fastest = tuple(sorted((*self.fastest, *other.fastest), key=_order))
        return SearchResult(tuple(best.values()), self.evaluated + other.evaluated, fastest)


def _order(candidate: Candidate) -> tuple[float, float]:
    """Fastest first, then what is nearest to fitting."""
    return candidate.seconds, candidate.memory.peak_bytes


class _Way(NamedTuple):
    """A way in which the ranks of a role share its weights."""

    sharding: Sharding
    read: float
    """Seconds in which the role reads the completions before the updates."""
    update: float
    """Seconds of its updates."""
    held: float
    """Bytes on each rank."""
    added: float
    """Bytes that reading or training adds."""
    beside: float
    """With a lag, seconds in which the role computes, which a thread that samples on its ranks waits for."""

    def beats(self, other: _Way) -> bool:
        """True if it takes no more of anything; of equal ones, true for the first."""
        less = all(mine <= its for mine, its in zip(self[1:], other[1:], strict=True))
        return less and (self[1:] != other[1:] or self.sharding < other.sharding)


class _Sampling(NamedTuple):
    """A way to sample."""

    together: int
    """Size of the tensor-parallel groups."""
    seconds: float
    """With the weight sync."""
    ahead: float
    """Seconds of the transfer during the critic's last update."""


class Search:
    """Looks for the plan with the shortest step that fits into memory."""

    def __init__(self, costs: Costs, memory: MemoryModel, *, keep: int = 1) -> None:
        """Take the prices, the memory, and how many plans of each style are wanted."""
        self.costs = costs
        self.memory = memory
        self._job = costs.job
        self._cluster = costs.cluster
        self._evaluated = 0
        self._keep = keep
        self._fitting: list[Candidate] = []
        self._device_bytes = memory.machine.device_bytes
        of_everyone = [
            costs.messages("gather"),
            costs.rows_to_read() * (1 + bool(self._job.frozen)),
            costs.values_read(),
            costs.rows_to_learn(),
            costs.loop(self._cluster.ranks),
        ]
        self._fixed = sum(work.seconds for work in of_everyone)

    def run(self, styles: Collection[str] = STYLES) -> SearchResult:
        """The best plans of some styles."""
        by_style: dict[str, list[Layout]] = {style: [] for style in STYLES if style in styles}
        for layout in layouts(self._job, self._cluster):
            if layout.style in by_style:
                by_style[layout.style].append(layout)
        best = [self._best(some) for some in by_style.values() if some]
        fastest = tuple(sorted(self._fitting, key=_order))
        return SearchResult(tuple(sorted(best, key=_order)), self._evaluated, fastest)

    def evaluate(self, plan: StepPlan) -> Candidate:
        """Memory and time of one plan."""
        candidate = Candidate.of(self.costs, self.memory, plan)
        self._evaluated += 1
        if candidate.time is not None:
            self._fitting.append(candidate)
        return candidate

    def _best(self, some: list[Layout]) -> Candidate:
        """The fastest plan of layouts of a style, or the one nearest to fitting."""
        order = itertools.count()
        heap = [(self._least_seconds(layout, NOTHING), next(order), layout, NOTHING) for layout in some]
        heapq.heapify(heap)
        fitting: list[Candidate] = []

        def limit() -> float:
            """Seconds from which a plan is too slow, whatever the rounding of sums."""
            return fitting[self._keep - 1].seconds * (1 - 1e-12) if len(fitting) >= self._keep else math.inf

        while heap and heap[0][0] < limit():
            _, _, layout, offload = heapq.heappop(heap)
            plans, fits = self._plans(layout, offload, limit())
            for number, (seconds, shared, together) in enumerate(plans):
                if seconds >= limit():
                    break
                plan = plan_of(self._job, layout, shared, together=together, offload=offload)
                candidate = self.evaluate(plan)
                if candidate.time is not None:
                    bisect.insort(fitting, candidate, key=lambda each: each.seconds)
                elif number == 0:
                    fits = False
            if offload == NOTHING and not fits:  # offloading only adds time
                for other in offloads(self._job, layout)[1:]:
                    heapq.heappush(heap, (self._least_seconds(layout, other), next(order), layout, other))
        return fitting[0] if fitting else self._nearest(some)

    def _least_seconds(self, layout: Layout, offload: Offload) -> float:
        """Seconds that a step of a layout takes at least: of each role and of sampling the fastest."""
        ways = {name: self._ways_of(layout, name, offload) for name in self._job.roles}
        sampled = min(self._fastest_sampling(layout, offload, way.sharding) for way in ways["actor"])
        fastest = {
            name: some[0]._replace(
                read=min(way.read for way in some),
                update=min(way.update for way in some),
                beside=min(way.beside for way in some),
            )
            for name, some in ways.items()
        }
        return self._seconds(layout, fastest, sampled)

    def _fastest_sampling(self, layout: Layout, offload: Offload, actor: Sharding) -> float:
        """Seconds of sampling with its weight sync, at least."""
        return min(sampling.seconds for sampling in self._samplings(layout, offload, actor))

    def _plans(
        self, layout: Layout, offload: Offload, limit: float
    ) -> tuple[list[tuple[float, dict[str, Sharding], int]], bool]:
        """Plans of a layout that take less than a limit, by their seconds with room for all completions; those whose
        weights alone do not fit are left out.

        Returns:
            the seconds with how the roles are shared and how is sampled, and false if any were left out for their
            memory.
        """
        every = {name: self._ways_of(layout, name, offload) for name in self._job.roles}
        roomy = {name: self._roomy(layout, every, name) for name in every}
        fits = roomy == every
        sampled = {way.sharding: self._fastest_sampling(layout, offload, way.sharding) for way in roomy["actor"]}
        plans = []
        for chosen in itertools.product(*roomy.values()):
            ways = dict(zip(roomy, chosen, strict=True))
            actor = ways["actor"].sharding
            if self._seconds(layout, ways, sampled[actor]) >= limit:
                continue
            if not self._has_room(layout, ways):
                fits = False
                continue
            shared = {name: way.sharding for name, way in ways.items()}
            for sampling in self._samplings(layout, offload, actor):
                seconds = self._seconds(layout, ways, sampling.seconds, sampling.ahead)
                plans.append((seconds, shared, sampling.together))
        return sorted(plans, key=lambda plan: plan[0]), fits

    def _seconds(self, layout: Layout, ways: Mapping[str, _Way], sampled: float, ahead: float = 0.0) -> float:
        """Seconds of a step with room for all completions; with a policy lag, at least.

        Args:
            layout: the ranks of the roles.
            ways: of each role.
            sampled: seconds of sampling with its weight sync.
            ahead: seconds of the transfer during the critic's last update.
        """
        frozen = 0.0
        values = 0.0
        training = 0.0
        before = 0.0
        beside = 0.0
        sampler = SAMPLER if SAMPLER in layout.places else "actor"
        last = ways["critic"].update / self._job.updates if "critic" in ways else 0.0
        for names in layout.classes:
            learners = [ways[name] for name in names if name in LEARNERS]
            frozen = max(frozen, sum(ways[name].read for name in names if name in ways and name not in LEARNERS))
            values = max(values, sum(way.read for way in learners))
            busy = sum(way.update for way in learners)
            training = max(training, busy)
            before = max(before, busy - last * ("critic" in names))
            if sampler in names:
                beside = max(beside, sum(ways[name].beside for name in names if name in ways))
        main = self._fixed + frozen + values + max(training, before + ahead)
        # with a lag, ranks that send no weights go on to score during a sync
        return max(main, sampled + beside) if lag_of(self._job, layout) else main + sampled

    @once_for(
        lambda self, layout, offload, actor: (
            layout.places["actor"],
            layout.places.get(SAMPLER),
            actor,
            offload.offload_states,
        )
    )
    def _samplings(self, layout: Layout, offload: Offload, actor: Sharding) -> list[_Sampling]:
        """The ways to sample from an actor."""

        def sampling(together: int) -> _Sampling:
            plan = plan_of(self._job, layout, {"actor": actor}, together=together, offload=offload)
            works = self.costs.sampling(plan, rows_at_once=len(self._job.lengths.completions))
            seconds = max(work.seconds for work in works) + self.costs.weight_sync(plan).seconds
            return _Sampling(together, seconds, 0.0)

        return [sampling(together) for together in samplings(self._job, layout, self._cluster)]

    @once_for(lambda self, layout, name, offload: (name, layout.places[name], lag_of(self._job, layout), offload))
    def _ways_of(self, layout: Layout, name: str, offload: Offload) -> list[_Way]:
        """The ways of a role, without those that another one beats."""
        ways = [
            self._way(layout, name, sharding, offload) for sharding in shardings(self._job, name, layout.places[name])
        ]
        if name == "actor":  # its stage decides the weight sync too
            return ways
        return [way for way in ways if not any(other.beats(way) for other in ways)]

    def _way(self, layout: Layout, name: str, sharding: Sharding, offload: Offload) -> _Way:
        role = self._job.roles[name]
        plan = plan_of(self._job, layout, {name: sharding}, offload=offload)
        times = self._job.actor_reads(lag=plan.policy_lag) if name == "actor" else 1
        read = self.costs.read(role, plan) * times
        update = self.costs.updates(role, plan) if role.is_trained else Work()
        beside = (read + update).compute if plan.policy_lag else 0.0
        return _Way(sharding, read.seconds, update.seconds, *self.memory.of_role(plan, name), beside)

    def _roomy(self, layout: Layout, ways: Mapping[str, list[_Way]], name: str) -> list[_Way]:
        """The ways of a role that leave room for the least of the others."""
        beside = 0.0
        for names in layout.classes:
            if name in names:
                others = [other for other in names if other not in (name, SAMPLER)]
                beside = max(beside, sum(min(way.held for way in ways[other]) for other in others))
        return [way for way in ways[name] if beside + way.held + way.added <= self._device_bytes]

    def _has_room(self, layout: Layout, ways: Mapping[str, _Way]) -> bool:
        """True if all ranks have room for their roles and what one of them adds."""
        on_ranks = ([ways[name] for name in names if name in ways] for names in layout.classes)
        return all(
            sum(way.held for way in some) + max((way.added for way in some), default=0.0) <= self._device_bytes
            for some in on_ranks
        )

    def _nearest(self, some: list[Layout]) -> Candidate:
        """The plan of layouts that takes the least memory."""

        def smallest(layout: Layout) -> tuple[float, StepPlan]:
            offload = offloads(self._job, layout)[-1]
            ways = {
                name: min(self._ways_of(layout, name, offload), key=lambda way: way.held + way.added)
                for name in self._job.roles
            }
            held = max(sum(ways[name].held for name in names if name != SAMPLER) for names in layout.classes)
            shared = {name: way.sharding for name, way in ways.items()}
            together = samplings(self._job, layout, self._cluster)[-1]
            return held, plan_of(self._job, layout, shared, together=together, offload=offload)

        _, plan = min((smallest(layout) for layout in some), key=lambda pair: pair[0])
        return self.evaluate(plan)
