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
    Layout,
    Options,
    Sharding,
    joinings,
    lags,
    layouts,
    offloads,
    plan_of,
    shardings,
    tensor_parallels,
)
from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.placed_memory import MemoryModel, PlanMemory
from hybrid_rlhf.planning.plans import LEARNERS, SAMPLER, StepPlan
from hybrid_rlhf.planning.step_time import StepTime, step_time

STYLES = (*NAMED_STYLES, "hybrid")
Offload = tuple[bool, bool, bool]
"""offload_frozen, offload_states and offload_optimizer of a plan."""


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted memory and, where it fits and its time can be predicted, that too."""

    plan: StepPlan
    memory: PlanMemory
    time: StepTime | None = None

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

    def with_micro_batches(self, tokens: int | None) -> SearchResult:
        """The result as one of plans with this train.micro_batch_tokens."""

        def of(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
            return tuple(replace(each, plan=replace(each.plan, micro_batch_tokens=tokens)) for each in candidates)

        return replace(self, ranked=of(self.ranked), fastest=of(self.fastest))

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

    def beats(self, other: _Way) -> bool:
        """True if it takes no more of anything; of equal ones, true for the first."""
        less = all(mine <= its for mine, its in zip(self[1:], other[1:], strict=True))
        return less and (self[1:] != other[1:] or self.sharding < other.sharding)


class _Sampling(NamedTuple):
    """A way to sample."""

    tensor_parallel: int
    with_actor: bool
    seconds: float
    sync: float
    """Seconds of the weight sync."""
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
        self._ways: dict[tuple[object, ...], list[_Way]] = {}
        self._known_samplings: dict[tuple[object, ...], list[_Sampling]] = {}
        self._device_bytes = memory.device_bytes
        everyone = costs.exchange(1.0, kind="all_gather").seconds + costs.loop().seconds
        self._fixed = everyone + costs.exchange(1.0, kind="all_reduce").seconds * (1 + bool(self._job.frozen))

    def run(self, styles: Collection[str] = STYLES) -> SearchResult:
        """The best plans of some styles."""
        by_style: dict[str, list[Layout]] = {style: [] for style in STYLES}
        for layout in layouts(self._job, self._cluster):
            if layout.style in styles:
                by_style[layout.style].append(layout)
        best = [self._best(some) for some in by_style.values() if some]
        fastest = tuple(sorted(self._fitting, key=_order))
        return SearchResult(tuple(sorted(best, key=_order)), self._evaluated, fastest)

    def evaluate(self, plan: StepPlan) -> Candidate:
        """Memory and time of one plan."""
        memory = self.memory(plan)
        self._evaluated += 1
        if memory.misfit is not None:
            return Candidate(plan, memory)
        candidate = Candidate(plan, memory, step_time(self.costs, plan, rows_at_once=memory.rows_at_once))
        self._fitting.append(candidate)
        return candidate

    def _best(self, some: list[Layout]) -> Candidate:
        """The fastest plan of layouts of a style, or the one nearest to fitting."""
        order = itertools.count()
        none = (False, False, False)
        heap = [(self._least_seconds(layout, none), next(order), layout, none) for layout in some]
        heapq.heapify(heap)
        fitting: list[Candidate] = []

        def too_slow(seconds: float) -> bool:
            return len(fitting) >= self._keep and seconds >= fitting[self._keep - 1].seconds

        while heap and not too_slow(heap[0][0]):
            _, _, layout, offload = heapq.heappop(heap)
            limit = fitting[self._keep - 1].seconds if len(fitting) >= self._keep else math.inf
            plans, fits = self._plans(layout, offload, limit)
            for number, (seconds, options) in enumerate(plans):
                if too_slow(seconds):
                    break
                candidate = self.evaluate(plan_of(layout, options))
                if candidate.time is not None:
                    bisect.insort(fitting, candidate, key=lambda each: each.seconds)
                elif number == 0:
                    fits = False
            if offload == none and not fits:  # offloading only adds time
                for other in offloads(self._job, layout)[1:]:
                    heapq.heappush(heap, (self._least_seconds(layout, other), next(order), layout, other))
        return fitting[0] if fitting else self._nearest(some)

    def _least_seconds(self, layout: Layout, offload: Offload) -> float:
        """Seconds that a step of a layout takes at least: of each role and of sampling the fastest."""
        ways = {name: self._ways_of(layout, name, offload) for name in self._job.roles}
        reads = {name: min(way.read for way in some) for name, some in ways.items()}
        updates = {name: min(way.update for way in some) for name, some in ways.items()}
        fastest = min(self._fastest_sampling(layout, offload, way.sharding) for way in ways["actor"])
        return self._seconds(layout, reads, updates, _Sampling(1, False, fastest, 0.0, 0.0))

    def _fastest_sampling(self, layout: Layout, offload: Offload, actor: Sharding) -> float:
        """Seconds of sampling with its weight sync, at least."""
        return min(sampling.seconds + sampling.sync for sampling in self._samplings(layout, offload, actor))

    def _plans(self, layout: Layout, offload: Offload, limit: float) -> tuple[list[tuple[float, Options]], bool]:
        """Options of a layout that take less than a limit, by their seconds with room for all completions; those whose
        weights alone do not fit are left out.

        Returns:
            the seconds with the options, and false if any were left out for their memory.
        """
        names = [*self._job.roles]
        lag = lags(self._job, layout)[0]
        roomy = {name: self._roomy(layout, name, offload) for name in names}
        fits = all(len(some) == len(self._ways_of(layout, name, offload)) for name, some in roomy.items())
        plans: list[tuple[float, Options]] = []
        for chosen in itertools.product(*roomy.values()):
            ways = dict(zip(names, chosen, strict=True))
            actor = ways["actor"].sharding
            reads = {name: way.read for name, way in ways.items()}
            updates = {name: way.update for name, way in ways.items()}
            fastest = self._fastest_sampling(layout, offload, actor)
            if self._seconds(layout, reads, updates, _Sampling(1, False, fastest, 0.0, 0.0)) >= limit:
                continue
            if not self._has_room(layout, ways):
                fits = False
                continue
            shared = tuple((name, way.sharding) for name, way in ways.items())
            for sampling in self._samplings(layout, offload, actor):
                seconds = self._seconds(layout, reads, updates, sampling)
                options = Options(shared, sampling.tensor_parallel, lag, *offload, with_actor=sampling.with_actor)
                plans.append((seconds, options))
        return sorted(plans, key=lambda plan: plan[0]), fits

    def _seconds(
        self, layout: Layout, reads: Mapping[str, float], updates: Mapping[str, float], sampling: _Sampling
    ) -> float:
        """Seconds of a step with room for all completions; with a policy lag, at least."""
        frozen = 0.0
        values = 0.0
        training = 0.0
        before = 0.0
        last = updates.get("critic", 0.0) / self._job.updates
        for names in layout.classes:
            frozen = max(frozen, sum(reads[name] for name in names if name in reads and name not in LEARNERS))
            values = max(values, sum(reads[name] for name in names if name in LEARNERS))
            busy = sum(updates[name] for name in names if name in LEARNERS)
            training = max(training, busy)
            before = max(before, busy - last * ("critic" in names))
        main = self._fixed + frozen + values + max(training, before + sampling.ahead)
        if lags(self._job, layout)[0]:  # ranks that send no weights go on to score during a sync
            return max(main, sampling.sync + sampling.seconds)
        return main + sampling.sync + sampling.seconds

    def _samplings(self, layout: Layout, offload: Offload, actor: Sharding) -> list[_Sampling]:
        """The ways to sample from an actor."""
        lag = lags(self._job, layout)[0]
        rows = len(self._job.lengths.completions)
        key = (layout.places["actor"], layout.places.get(SAMPLER), actor, offload[1], lag)
        if key in self._known_samplings:
            return self._known_samplings[key]
        found = self._known_samplings[key] = []
        for together in tensor_parallels(self._job, layout, self._cluster):
            options = Options((("actor", actor),), together, lag, *offload)
            for joins in joinings(layout, self._cluster, options):
                plan = plan_of(layout, replace(options, with_actor=joins))
                seconds = max(work.seconds for work in self.costs.sampling(plan, rows_at_once=rows))
                ahead = self.costs.transfer_ahead(plan)
                sync = self.costs.weight_sync(plan).seconds
                found.append(_Sampling(together, joins, seconds, sync, 0.0 if ahead is None else ahead.seconds))
        return found

    def _ways_of(self, layout: Layout, name: str, offload: Offload) -> list[_Way]:
        """The ways of a role, without those that another one beats."""
        ranks = layout.places[name]
        lag = lags(self._job, layout)[0]
        key = (name, ranks, lag, offload)
        if key not in self._ways:
            ways = [
                self._way(layout, name, sharding, lag, offload)
                for sharding in shardings(self._job, self._cluster, name, ranks)
            ]
            if name != "actor":  # its stage decides the weight sync too
                ways = [way for way in ways if not any(other.beats(way) for other in ways)]
            self._ways[key] = ways
        return self._ways[key]

    def _way(self, layout: Layout, name: str, sharding: Sharding, lag: int, offload: Offload) -> _Way:
        role = self._job.roles[name]
        plan = plan_of(layout, Options(((name, sharding),), 1, lag, *offload))
        times = self._job.actor_reads(lag=lag) if name == "actor" else 1
        read = self.costs.read(role, plan, times=times).seconds if times else 0.0
        update = self.costs.updates(role, plan).seconds if role.is_trained else 0.0
        return _Way(sharding, read, update, *self.memory.of_role(plan, name))

    def _roomy(self, layout: Layout, name: str, offload: Offload) -> list[_Way]:
        """The ways of a role that leave room for the least of the others."""
        least = {
            other: min(way.held for way in self._ways_of(layout, other, offload))
            for names in layout.classes
            if name in names
            for other in names
            if other not in (name, SAMPLER)
        }
        most = max(sum(least.get(other, 0.0) for other in names) for names in layout.classes if name in names)
        return [
            way for way in self._ways_of(layout, name, offload) if most + way.held + way.added <= self._device_bytes
        ]

    def _has_room(self, layout: Layout, ways: Mapping[str, _Way]) -> bool:
        return all(
            sum(ways[name].held for name in names if name != SAMPLER)
            + max((ways[name].added for name in names if name != SAMPLER), default=0.0)
            <= self._device_bytes
            for names in layout.classes
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
            shared = tuple((name, way.sharding) for name, way in ways.items())
            together = tensor_parallels(self._job, layout, self._cluster)[-1]
            return held, plan_of(layout, Options(shared, together, lags(self._job, layout)[0], *offload))

        _, plan = min((smallest(layout) for layout in some), key=lambda pair: pair[0])
        self._evaluated += 1
        return Candidate(plan, self.memory(plan))
