"""The best plan of each style, by enumeration: style, ranks, ZeRO stages and tensor parallelism.

Each role is on all ranks or on one of two ranges of consecutive ranks, where a separate sampler and the actor are on
different ranges; this gives all styles. With it come a ZeRO stage of the learners, one of each frozen role, sizes of
the groups that sample, and settings that offload. HybridFlow (arXiv 2409.19256, algorithm 1) enumerates partitions of
roles, without roles on all ranks. Plans are priced with memory for all completions at once; those whose
weights alone do not fit are left out. The others are checked in the order of these prices, until none can be faster
than the best that fits.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_rlhf.configs.sections.placement import STYLES as NAMED_STYLES
from hybrid_rlhf.configs.sections.placement import ZeroStage
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import RLJob
from hybrid_rlhf.planning.placed_memory import MemoryModel, PlanMemory
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan, style_of
from hybrid_rlhf.planning.step_time import StepTime, StepTimer
from hybrid_rlhf.runtime.observability.progress import ProgressLog
from hybrid_rlhf.runtime.placement import CRITIC_COPY, Placement, RolePlacement

STYLES = (*NAMED_STYLES, "hybrid")
PARTS = 8
"""Up to this number of ranks every size of a range is tried; beyond it, multiples of at least a PARTS-th of them."""
_CHECKED = 200
"""Largest number of plans of a style whose memory is checked, not counting those whose weights alone do not fit."""
_ALL_ROWS = 10**9
_SINGLE = ("actor", "critic", "reference", "teacher")

Layout = Mapping[str, tuple[int, ...]]
"""The ranks of each role."""


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted memory and, if it fits and its time can be predicted, its time."""

    plan: StepPlan
    memory: PlanMemory
    time: StepTime | None = None

    @property
    def fits(self) -> bool:
        """True if every rank has the memory for it."""
        return self.memory.misfit is None

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite if it does not fit."""
        return math.inf if self.time is None else self.time.step_seconds


@dataclass(frozen=True)
class SearchResult:
    """The best plans."""

    ranked: tuple[Candidate, ...]
    """The best plan of each style, fastest first; of a style without a plan that fits, the one nearest to fitting."""
    evaluated: int
    """Number of plans whose memory was checked."""
    fastest: tuple[Candidate, ...]
    """All plans that were found to fit, fastest first."""

    @property
    def best(self) -> Candidate | None:
        """The fastest plan; None if no plan fits."""
        return self.ranked[0] if self.ranked and self.ranked[0].time is not None else None

    def merged(self, other: SearchResult) -> SearchResult:
        """The better plan of each style of two results."""
        best: dict[str, Candidate] = {}
        for each in sorted((*self.ranked, *other.ranked), key=_order):
            best.setdefault(each.plan.placement.style, each)
        fastest = tuple(sorted((*self.fastest, *other.fastest), key=_order))
        return SearchResult(tuple(best.values()), self.evaluated + other.evaluated, fastest)


def _order(candidate: Candidate) -> tuple[float, float]:
    """Fastest first, then the nearest to fitting."""
    return candidate.seconds, candidate.memory.peak_bytes


class Search:
    """Looks for the plan with the shortest step that fits into memory."""

    def __init__(self, timer: StepTimer, memory: MemoryModel, *, keep: int = 1) -> None:
        """Take the models of time and memory, and the number of plans of each style to find."""
        self.timer = timer
        self.memory = memory
        self._keep = keep
        self._evaluated = 0
        self._fitting: list[Candidate] = []

    def run(self, styles: Collection[str] = STYLES) -> SearchResult:
        """The best plans of some styles."""
        ranks = self.timer.cluster.ranks
        job, cluster = self.timer.job, self.timer.cluster
        by_style: dict[str, list[StepPlan]] = {style: [] for style in STYLES if style in styles}
        for layout in layouts(job, cluster):
            if (style := style_of(layout, ranks)) in by_style:
                by_style[style] += plans_of(job, cluster, layout)
        ways = {style: sum(1 + len(offloads(job, plan)) for plan in plans) for style, plans in by_style.items()}
        progress = ProgressLog("searching placements", total=sum(ways.values()), unit="plans")
        best = [self._best(plans, ways[style], progress) for style, plans in by_style.items() if plans]
        return SearchResult(tuple(sorted(best, key=_order)), self._evaluated, tuple(sorted(self._fitting, key=_order)))

    def evaluate(self, plan: StepPlan) -> Candidate:
        """Predict a plan with the micro-batches of the job; the time with a copy of the critic is not predicted."""
        plan = replace(plan, micro_batch_tokens=self.timer.job.config.train.micro_batch_tokens)
        need = self.memory(plan)
        self._evaluated += 1
        if need.misfit is not None or CRITIC_COPY in plan.roles:
            return Candidate(plan, need)
        self._fitting.append(Candidate(plan, need, self.timer(plan, rows_at_once=need.rows_at_once)))
        return self._fitting[-1]

    def _best(self, plans: list[StepPlan], ways: int, progress: ProgressLog) -> Candidate:
        """The fastest plan of a style, or the one nearest to fitting. Offloading only adds time, so it is tried on
        plans that are faster than the best that fits; with it there are a number of ways."""
        job = self.timer.job
        found: list[Candidate] = []
        misfits = self._fastest(plans, found, progress)
        offloaded = [replace(plan, **each) for plan in misfits for each in offloads(job, plan)]
        progress.advance(ways - len(plans) - len(offloaded))
        self._fastest(offloaded, found, progress)
        return found[0] if found else self.evaluate(min(offloaded or plans, key=self._held))

    def _fastest(self, plans: list[StepPlan], found: list[Candidate], progress: ProgressLog) -> list[StepPlan]:
        """Add the fastest plans that fit to those found; returns the plans that do not fit and are faster."""
        misfits = []
        last = self._evaluated + _CHECKED
        priced = sorted((self._least(plan, progress), place) for place, plan in enumerate(plans))
        for left, (seconds, place) in zip(range(len(plans), 0, -1), priced, strict=True):
            if len(found) >= self._keep and seconds >= found[self._keep - 1].seconds:
                progress.advance(left)
                break
            progress.advance()
            plan = plans[place]
            has_room = self._evaluated < last and self._held(plan) <= self.memory.machine.device_bytes
            candidate = self.evaluate(plan) if has_room else None
            if candidate is None or candidate.time is None:
                misfits.append(plan)
            else:
                bisect.insort(found, candidate, key=_order)
        return misfits

    def _least(self, plan: StepPlan, progress: ProgressLog) -> float:
        """Seconds with memory for all completions at once."""
        progress.advance(0)
        return self.timer(plan, rows_at_once=_ALL_ROWS).step_seconds

    def _held(self, plan: StepPlan) -> float:
        """Bytes on the fullest rank: its roles and the largest pass of one of them, without those of a sampler."""
        most = 0.0
        for names, _ in self.timer.classes(plan):
            roles = [self.memory.of_role(plan, name) for name in names if name in self.timer.job.roles]
            added = max((each for _, each in roles), default=0.0)
            most = max(most, sum(held for held, _ in roles) + added)
        return most


def layouts(job: RLJob, cluster: Cluster) -> Iterator[Layout]:
    """Ranks of the roles; flattening first, and alone with experts that ranks split. Reward models are together. A base
    in 4 bits has no separate sampler."""
    everyone, unit = cluster.everyone, unit_of(cluster)
    kinds = {role: kind if (kind := role.partition(".")[0]) in _SINGLE else "rewards" for role in job.roles}
    kinds |= {role.name: role.bound_to for role in job.roles.values() if role.bound_to is not None}
    yield dict.fromkeys(sorted(kinds), everyone)
    if job.config.model.expert_parallel > 1:
        return
    for size in range(unit, cluster.ranks, unit):
        ranges = (everyone, everyone[:size], everyone[size:])
        for sides in itertools.product(range(3), repeat=len({*kinds.values()})):
            placed = dict(zip(dict.fromkeys(kinds.values()), sides, strict=True))
            found = {name: ranges[placed[kind]] for name, kind in kinds.items()}
            parted = [side for side in sides if side]
            if parted[:1] == [1] and 2 in parted:  # both ranges are used, and each layout has one description
                yield dict(sorted(found.items()))
            # nothing trains where a sampler works beside training
            critic_apart = placed.get("critic", 1) == 1 or not job.config.rollout.overlap_steps
            if placed["actor"] == 1 and critic_apart and job.config.model.quantization is None:
                yield dict(sorted((found | {SAMPLER: ranges[2]}).items()))


def unit_of(cluster: Cluster) -> int:
    """Ranks by which ranges grow."""
    least = math.ceil(cluster.ranks / PARTS)
    divisors = [size for size in range(least, cluster.ranks + 1) if cluster.ranks % size == 0]
    each = cluster.ranks_per_host
    return next((size for size in divisors if each % size == 0 or size % each == 0), 1) if least > 1 else 1


def plans_of(job: RLJob, cluster: Cluster, layout: Layout) -> Iterator[StepPlan]:
    """The plans of a layout: ZeRO stages, and sizes of the groups that sample."""
    style = style_of(layout, cluster.ranks)
    sampler = SAMPLER if SAMPLER in layout else "actor"
    sizes = group_sizes(job, cluster, layout[sampler])
    shares = any(role.bound_to for role in job.roles.values())  # a shared base needs whole weights
    learners = [
        {role.name: _stage(stage, layout[role.name]) for role in job.learners}
        for stage in ((0, 2) if shares else (0, 1, 2) if _eight_bit(job) else (0, 1, 2, 3))
    ]
    frozen = [[{role.name: _stage(stage, layout[role.name])} for stage in (0, 3)] for role in job.frozen]
    products = (
        tuple(item for each in chosen for item in each.items()) for chosen in itertools.product(learners, *frozen)
    )
    for zero in map(dict, dict.fromkeys(products)):
        for size in sizes:
            roles = {
                name: RolePlacement(ranks, zero.get(name, 0), size if name == sampler else 1)
                for name, ranks in layout.items()
            }
            yield StepPlan(Placement(roles, style))


def _stage(stage: ZeroStage, ranks: tuple[int, ...]) -> ZeroStage:
    """A stage that differs from 0 on one rank serves offloading alone."""
    return stage if len(ranks) > 1 else 2 if stage in (1, 2) else 0


def _eight_bit(job: RLJob) -> bool:
    """True if a learner has moments in 8 bits, which are neither under ZeRO-3 nor on the host."""
    return any(role.optimizer is not None and role.optimizer.name == "adamw_8bit" for role in job.learners)


def group_sizes(job: RLJob, cluster: Cluster, ranks: tuple[int, ...]) -> list[int]:
    """Sizes of tensor-parallel groups that divide the ranks and do not cross hosts; 1 alone for programs, which ask one
    rank."""
    environment = job.config.environment
    if environment is not None and environment.path is None:
        return [1]
    each = cluster.ranks_per_host
    return [
        size
        for size in range(1, min(len(ranks), each, job.actor.sizes.heads) + 1)
        if len(ranks) % size == 0 and each % size == 0 and ranks[0] % size == 0
    ]


def offloads(job: RLJob, plan: StepPlan) -> list[dict[str, Any]]:
    """Settings that offload, as fields of a plan. A CPU is its own host."""
    useful = {
        "offload_frozen": bool(job.frozen),
        "offload_states": not plan.separate,
        "offload_optimizer": any(plan.roles[role.name].zero for role in job.learners) and not _eight_bit(job),
    }
    names = [name for name, is_useful in useful.items() if is_useful and job.device.type == "cuda"]
    return [
        dict.fromkeys(chosen, True)
        for count in range(1, len(names) + 1)
        for chosen in itertools.combinations(names, count)
    ]
