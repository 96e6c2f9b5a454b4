"""The best plan: exact up to EXACT_RANKS ranks, by simulated annealing beyond.

Exact: best first by a lower bound of the step's time (the work of each phase on its most loaded rank, without slowdowns
or waiting), which no simulation undercuts; a layout's options are expanded when its own bound, with the cheapest option
of every role, comes up. Options that another one of the same role dominates in time and memory are dropped first.
Memory is a hard constraint. Annealing (Kirkpatrick et al. 1983) visits plans by their bound, and simulates the best.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybrid_rlhf.configs.sections.placement import STYLES as NAMED_STYLES
from hybrid_rlhf.placement.candidates import (
    EXACT_RANKS,
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
from hybrid_rlhf.placement.costs import Costs
from hybrid_rlhf.placement.memory import MemoryModel, PlanMemory
from hybrid_rlhf.placement.plans import LEARNERS, SAMPLER, StepPlan
from hybrid_rlhf.placement.schedule import StepTime, step_time

STYLES = (*NAMED_STYLES, "hybrid")
_ANNEALING_MOVES, _ANNEALING_STARTS = 700, 3
"""Of each style."""
_FIRST_TEMPERATURE, _LAST_TEMPERATURE = 0.3, 0.005
"""Relative increases of time that are accepted with a chance of 1/e, at the beginning and the end."""
_SIMULATED = 6
"""Best plans of each style by their bound that are simulated after annealing."""


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted memory and, where it fits and its time can be predicted, that too."""

    plan: StepPlan
    memory: PlanMemory
    time: StepTime | None = None

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory for it."""
        return self.memory.misfit is None

    @property
    def seconds(self) -> float:
        """Of a step; infinite where it does not fit."""
        return math.inf if self.time is None else self.time.step_seconds


@dataclass(frozen=True)
class SearchResult:
    """What a search found."""

    ranked: tuple[Candidate, ...]
    """The best plan of each style, fastest first; of a style without a plan that fits, the one nearest to fitting."""
    evaluated: int
    """Plans whose memory was checked."""
    fastest: tuple[Candidate, ...]
    """All plans whose time was simulated, fastest first."""

    @property
    def simulated(self) -> int:
        """Plans whose time was simulated."""
        return len(self.fastest)

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


class Search:
    """Looks for the plan with the shortest step that fits into memory."""

    def __init__(self, costs: Costs, memory: MemoryModel, *, seed: int = 0, keep: int = 1) -> None:
        """Take the prices, the memory, the seed of the annealing, and how many plans of each style are wanted."""
        self.costs, self.memory = costs, memory
        self._job, self._cluster = costs.job, costs.cluster
        self._rng = np.random.default_rng(seed)
        self._evaluated, self._keep = 0, keep
        self._timed: list[Candidate] = []

    def run(self, styles: Collection[str] = STYLES) -> SearchResult:
        """The best plans of some styles."""
        by_style: dict[str, list[Layout]] = {style: [] for style in STYLES}
        for layout in layouts(self._job, self._cluster):
            if layout.style in styles:
                by_style[layout.style].append(layout)
        look = self._exact if self._cluster.ranks <= EXACT_RANKS else self._annealed
        found = [best for style in STYLES if by_style[style] and (best := look(by_style[style])) is not None]
        fastest = tuple(sorted(self._timed, key=_order))
        return SearchResult(tuple(sorted(found, key=_order)), self._evaluated, fastest)

    def evaluate(self, plan: StepPlan) -> Candidate:
        """Memory and time of one plan."""
        memory = self.memory(plan)
        self._evaluated += 1
        if memory.misfit is not None:
            return Candidate(plan, memory)
        candidate = Candidate(plan, memory, step_time(self.costs, plan, rows_at_once=memory.rows_at_once))
        self._timed.append(candidate)
        return candidate

    def bound(self, plan: StepPlan, *, rows_at_once: int | None = None) -> float:
        """Seconds that a step of a plan takes at least; without rows_at_once, with room for all completions."""
        reads = {name: self._read(plan, name) for name in self._job.roles}
        updates = {name: self._updates(plan, name) for name in self._job.roles}
        ahead = self.costs.transfer_ahead(plan)
        syncs = self.costs.weight_sync(plan).seconds, 0.0 if ahead is None else ahead.seconds
        return self._bound(plan, reads, updates, syncs, rows_at_once)

    def _bound(
        self,
        plan: StepPlan,
        reads: dict[str, float],
        updates: dict[str, float],
        syncs: tuple[float, float],
        rows_at_once: int | None = None,
    ) -> float:
        """`syncs`: seconds of the weight sync, and of the transfer during the critic's last update."""
        costs = self.costs
        rows = len(self._job.lengths.completions) if rows_at_once is None else rows_at_once
        sampling = max(work.seconds for work in costs.sampling(plan, rows_at_once=rows))
        frozen = {name: taken for name, taken in reads.items() if name not in LEARNERS}
        values = {name: taken for name, taken in reads.items() if name in LEARNERS}
        main = costs.exchange(1.0, kind="all_gather").seconds
        main += costs.exchange(1.0, kind="all_reduce").seconds * (1 + bool(frozen))
        main += costs.loop().seconds
        main += sum(_busiest(plan, seconds) for seconds in (frozen, values) if seconds)
        before = {name: taken * (1 - (name == "critic") / self._job.updates) for name, taken in updates.items()}
        main += max(_busiest(plan, updates), _busiest(plan, before) + syncs[1])
        # with a lag, ranks that send no weights go on to score during a sync
        return max(main, sampling) if plan.policy_lag else main + syncs[0] + sampling

    def _read(self, plan: StepPlan, name: str) -> float:
        """Seconds in which a role reads the completions before the updates."""
        times = self._job.actor_reads(lag=plan.policy_lag) if name == "actor" else 1
        return self.costs.read(self._job.roles[name], plan, times=times).seconds if times else 0.0

    def _updates(self, plan: StepPlan, name: str) -> float:
        role = self._job.roles[name]
        return self.costs.updates(role, plan).seconds if role.is_trained else 0.0

    # Exact

    def _exact(self, found: list[Layout]) -> Candidate | None:
        """The fastest plan of some layouts, or the one nearest to fitting."""
        order = itertools.count()
        heap: list[tuple[float, int, Layout, Options | None, tuple[bool, bool, bool]]] = []
        none = (False, False, False)
        for layout in found:
            heap.append((self._layout_bound(layout, none), next(order), layout, None, none))
        heapq.heapify(heap)
        fitting: list[Candidate] = []
        nearest: Candidate | None = None

        def too_slow(bound: float) -> bool:
            return len(fitting) >= self._keep and bound >= fitting[self._keep - 1].seconds

        while heap and not too_slow(heap[0][0]):
            _, _, layout, options, offload = heapq.heappop(heap)
            if options is None:
                if offload == none:  # offloading only adds time, so its bounds follow the layout's
                    for other in offloads(self._job, layout)[1:]:
                        heapq.heappush(heap, (self._layout_bound(layout, other), next(order), layout, None, other))
                if not self._may_fit(layout, offload):
                    nearest = self._nearer(nearest, layout, offload)
                    continue
                for option in self._undominated(layout, offload):
                    bound = self.bound(plan_of(layout, option))
                    if not too_slow(bound):
                        heapq.heappush(heap, (bound, next(order), layout, option, offload))
                continue
            candidate = self.evaluate(plan_of(layout, options))
            if candidate.time is not None:
                bisect.insort(fitting, candidate, key=lambda each: each.seconds)
        return fitting[0] if fitting else nearest

    def _layout_bound(self, layout: Layout, offload: tuple[bool, bool, bool]) -> float:
        """The least bound of any options: each role with its cheapest sharding, and no weight sync."""
        reads: dict[str, float] = {}
        updates: dict[str, float] = {}
        for name in self._job.roles:
            plans = [
                plan_of(layout, Options(((name, way),), 1, lag, *offload))
                for way in shardings(self._job, self._cluster, name, layout.of(name))
                for lag in lags(self._job, layout)
            ]
            reads[name] = min(self._read(plan, name) for plan in plans)
            updates[name] = min(self._updates(plan, name) for plan in plans)
        known = [
            Options((), size, lag, *offload)
            for size in tensor_parallels(self._job, layout, self._cluster)
            for lag in lags(self._job, layout)
        ]
        return min(
            self._bound(plan_of(layout, replace(options, with_actor=joins)), reads, updates, (0.0, 0.0))
            for options in known
            for joins in joinings(layout, self._cluster, options)
        )

    def _may_fit(self, layout: Layout, offload: tuple[bool, bool, bool]) -> bool:
        """Whether the options that take the least memory fit."""
        self._evaluated += 1
        return any(self.memory(plan_of(layout, each)).misfit is None for each in self._smallest(layout, offload))

    def _smallest(self, layout: Layout, offload: tuple[bool, bool, bool]) -> Iterator[Options]:
        """Options of which one takes the least memory: frozen roles under ZeRO-3, or under tensor parallelism."""
        ways = {name: shardings(self._job, self._cluster, name, ranks) for name, ranks in layout.ranks}
        split = {
            name: next((way for way in known if way.tensor_parallel > 1), known[-1]) for name, known in ways.items()
        }
        last = {name: known[-1] for name, known in ways.items()}
        for together in tensor_parallels(self._job, layout, self._cluster)[::-1]:
            for lag in lags(self._job, layout):
                for shared in (last, split) if split != last else (last,):
                    yield Options(tuple(shared.items()), together, lag, *offload)

    def _nearer(self, nearest: Candidate | None, layout: Layout, offload: tuple[bool, bool, bool]) -> Candidate:
        for options in self._smallest(layout, offload):
            plan = plan_of(layout, options)
            candidate = Candidate(plan, self.memory(plan))
            if nearest is None or candidate.memory.peak_bytes < nearest.memory.peak_bytes:
                nearest = candidate
        assert nearest is not None
        return nearest

    def _undominated(self, layout: Layout, offload: tuple[bool, bool, bool]) -> Iterator[Options]:
        """Options of a layout, without shardings of a role that another one beats in time and memory."""
        kept = [self._kept(layout, name, ranks, offload) for name, ranks in layout.ranks]
        for shared in itertools.product(*kept):
            for together in tensor_parallels(self._job, layout, self._cluster):
                for lag in lags(self._job, layout):
                    options = Options(tuple(shared), together, lag, *offload)
                    for joins in joinings(layout, self._cluster, options):
                        yield replace(options, with_actor=joins)

    def _kept(
        self, layout: Layout, name: str, ranks: tuple[int, ...], offload: tuple[bool, bool, bool]
    ) -> list[tuple[str, Sharding]]:
        ways = shardings(self._job, self._cluster, name, ranks)
        if name in (SAMPLER, "actor"):  # the actor's stage decides the weight sync too
            return [(name, way) for way in ways]
        marks = {}
        role, lag = self._job.roles[name], lags(self._job, layout)[0]
        for way in ways:
            plan = plan_of(layout, Options(((name, way),), 1, lag, *offload))
            work = [self.costs.read(role, plan)] + ([self.costs.updates(role, plan)] if role.is_trained else [])
            # compute apart from wire: only compute is slowed by others
            seconds = [part for each in work for part in (each.compute, each.wire)]
            marks[way] = (*seconds, *self.memory.shares(plan, name))

        def dominated(way: Sharding) -> bool:
            mine = marks[way]
            return any(
                other != way
                and all(a <= b for a, b in zip(marks[other], mine, strict=True))
                and (marks[other] != mine or other < way)
                for other in ways
            )

        return [(name, way) for way in ways if not dominated(way)]

    # Annealing

    def _annealed(self, found: list[Layout]) -> Candidate | None:
        """The fastest plan that annealing over some layouts finds, or the one nearest to fitting."""
        seen: dict[tuple[Layout, Options], float] = {}
        for _ in range(_ANNEALING_STARTS):
            layout = found[int(self._rng.integers(len(found)))]
            state = (layout, next(self._smallest(layout, (False, False, False))))
            energy = seen[state] = self._energy(state)
            for move in range(_ANNEALING_MOVES):
                share = move / _ANNEALING_MOVES
                temperature = _FIRST_TEMPERATURE * (_LAST_TEMPERATURE / _FIRST_TEMPERATURE) ** share
                other = self._neighbour(state, found)
                if other not in seen:
                    seen[other] = self._energy(other)
                worse = (seen[other] - energy) / energy
                if worse <= 0 or self._rng.random() < math.exp(-worse / temperature):
                    state, energy = other, seen[other]
        ordered = sorted(seen, key=lambda state: seen[state])
        candidates = [self.evaluate(plan_of(*state)) for state in ordered[: max(_SIMULATED, self._keep)]]
        return min(candidates, key=lambda each: (each.seconds, each.memory.peak_bytes), default=None)

    def _energy(self, state: tuple[Layout, Options]) -> float:
        """The bound of a plan; of one that does not fit a number above all bounds, rising with what is missing."""
        plan = plan_of(*state)
        memory = self.memory(plan)
        self._evaluated += 1
        misfit = memory.misfit
        if misfit is not None:
            return 1e9 * misfit.phase.total / misfit.phase.machine.device_bytes
        return self.bound(plan, rows_at_once=memory.rows_at_once)

    def _neighbour(self, state: tuple[Layout, Options], found: list[Layout]) -> tuple[Layout, Options]:
        layout, options = state
        rng: Any = self._rng
        kind = rng.integers(4)
        if kind == 0 and len(found) > 1:
            layout = self._near(layout, found)
        elif kind == 1:
            shared = dict(options.shardings)
            name, ranks = layout.ranks[int(rng.integers(len(layout.ranks)))]
            ways = shardings(self._job, self._cluster, name, ranks)
            shared[name] = ways[int(rng.integers(len(ways)))]
            options = replace(options, shardings=tuple(shared.items()))
        elif kind == 2:
            chosen = int(rng.choice(tensor_parallels(self._job, layout, self._cluster)))
            options = replace(options, tensor_parallel=chosen)
            known_joinings = joinings(layout, self._cluster, options)
            options = replace(options, with_actor=known_joinings[int(rng.integers(len(known_joinings)))])
        else:
            known = offloads(self._job, layout)
            offload = known[int(rng.integers(len(known)))]
            options = replace(
                options, offload_frozen=offload[0], offload_states=offload[1], offload_optimizer=offload[2]
            )
        return layout, self._valid(layout, options)

    def _near(self, layout: Layout, found: list[Layout]) -> Layout:
        """Of some random layouts, the one in which fewest roles change their ranks."""
        drawn = [found[int(place)] for place in self._rng.integers(len(found), size=16)]
        mine = dict(layout.ranks)
        others = [each for each in drawn if each != layout] or drawn
        return min(others, key=lambda each: sum(mine.get(name) != ranks for name, ranks in each.ranks))

    def _valid(self, layout: Layout, options: Options) -> Options:
        """The options, with what the layout does not allow replaced."""
        shared = dict(options.shardings)
        ways = {name: shardings(self._job, self._cluster, name, ranks) for name, ranks in layout.ranks}
        kept = {name: shared[name] if shared.get(name) in known else known[-1] for name, known in ways.items()}
        together = tensor_parallels(self._job, layout, self._cluster)
        size = options.tensor_parallel if options.tensor_parallel in together else together[-1]
        states = options.offload_states and SAMPLER not in dict(layout.ranks)
        found = replace(
            options,
            shardings=tuple(kept.items()),
            tensor_parallel=size,
            policy_lag=lags(self._job, layout)[0],
            offload_states=states,
        )
        return replace(found, with_actor=found.with_actor and joinings(layout, self._cluster, found)[-1])


def _busiest(plan: StepPlan, seconds: dict[str, float]) -> float:
    """Seconds of the rank with the most work among roles."""
    loads: dict[tuple[int, ...], float] = {}
    for name, taken in seconds.items():
        ranks = plan.roles[name].ranks
        loads[ranks] = loads.get(ranks, 0.0) + taken
    busiest = 0.0
    for ranks in loads:
        # ranges are nested or disjoint: the roles of a range's first rank are its own and those around
        first = ranks[0]
        busiest = max(busiest, sum(taken for other, taken in loads.items() if first in other))
    return busiest
