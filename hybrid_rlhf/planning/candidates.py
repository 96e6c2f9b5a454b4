"""The plans that a search looks at.

Roles are divided into those on all ranks and groups on disjoint ranges of consecutive ranks, the largest range first,
so that ranges begin at hosts where sizes allow; a separate sampler is in another group than the actor. With this come
ZeRO stages, tensor parallelism of the sampler and of frozen roles, the actor's ranks as further samplers, and settings
that offload. HybridFlow (arXiv
2409.19256, algorithm 1) enumerates the same set partitions, without roles on all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from hybrid_rlhf.configs.sections.placement import ZeroStage
from hybrid_rlhf.planning.job import RLJob, RoleJob
from hybrid_rlhf.planning.plans import SAMPLER, Cluster, StepPlan, style_of
from hybrid_rlhf.runtime.placement import Placement, RolePlacement

PARTS = 16
"""Up to so many ranks every size of a range is tried; beyond, multiples of at least a part of the ranks."""


@dataclass(frozen=True)
class Layout:
    """The ranks of each role."""

    ranks: tuple[tuple[str, tuple[int, ...]], ...]
    style: str

    @cached_property
    def classes(self) -> list[list[str]]:
        """The roles of each set of ranks that hold the same ones."""
        firsts = {ranks[0] for _, ranks in self.ranks}
        return [[name for name, ranks in self.ranks if ranks[0] <= first <= ranks[-1]] for first in sorted(firsts)]

    @cached_property
    def places(self) -> dict[str, tuple[int, ...]]:
        """The ranks by role."""
        return dict(self.ranks)


class Sharding(NamedTuple):
    """How the ranks of a role share its weights."""

    zero: ZeroStage
    tensor_parallel: int = 1
    """Size of the tensor-parallel groups of a frozen role."""


@dataclass(frozen=True)
class Options:
    """What besides the ranks a plan chooses; each field is one choice."""

    shardings: tuple[tuple[str, Sharding], ...]
    """How each role is shared."""
    tensor_parallel: int
    """Size of the tensor-parallel groups that sample."""
    policy_lag: int
    offload_frozen: bool = False
    offload_states: bool = False
    offload_optimizer: bool = False
    with_actor: bool = False
    """True if the actor's ranks sample beside a sampler's."""


def unit_of(cluster: Cluster) -> int:
    """Ranks by which ranges grow."""
    if cluster.ranks <= PARTS:
        return 1
    least = math.ceil(cluster.ranks / PARTS)
    divisors = [size for size in range(least, cluster.ranks + 1) if cluster.ranks % size == 0]
    return next(size for size in divisors if cluster.ranks_per_host % size == 0 or size % cluster.ranks_per_host == 0)


def placed(job: RLJob, everywhere: Sequence[str], groups: Sequence[tuple[Sequence[str], int]], ranks: int) -> Layout:
    """A layout of roles on all ranks and groups of roles on ranges of the given sizes."""
    found = dict.fromkeys(everywhere, _range(0, ranks))
    start = 0
    for names, size in sorted(groups, key=lambda group: -group[1]):
        found |= dict.fromkeys(names, _range(start, start + size))
        start += size
    for role in job.roles.values():
        if role.bound_to is not None:
            found[role.name] = found[role.bound_to]
    return Layout(tuple(sorted(found.items())), style_of(found, ranks))


def layouts(job: RLJob, cluster: Cluster) -> Iterator[Layout]:
    """All layouts; flattening first."""
    free = [role.name for role in job.roles.values() if role.bound_to is None]
    yield placed(job, free, (), cluster.ranks)
    unit = unit_of(cluster)
    # a thread that samples ahead needs ranks on which nothing trains
    apart = {"actor", "critic"} if job.config.rollout.policy_lag else {"actor"}
    for names in (free, [*free, SAMPLER]):
        for count in range(len(names) - 1):
            for everywhere in itertools.combinations(names, count):
                if SAMPLER in names and ({SAMPLER} | apart) & set(everywhere):
                    continue
                rest = [name for name in names if name not in everywhere]
                for groups in _partitions(rest):
                    if len(groups) < 2 or any(SAMPLER in group and apart & {*group} for group in groups):
                        continue
                    for sizes in _compositions(cluster.ranks // unit, len(groups)):
                        sized = [(group, size * unit) for group, size in zip(groups, sizes, strict=True)]
                        yield placed(job, everywhere, sized, cluster.ranks)


def shardings(job: RLJob, cluster: Cluster, name: str, ranks: tuple[int, ...]) -> list[Sharding]:
    """How a role may be shared by its ranks, from the fastest compute to the least memory; a stage that shards nothing
    serves offloading alone."""
    stages: tuple[ZeroStage, ...]
    if name == SAMPLER:
        return [Sharding(0)]
    role = job.roles[name]
    if not role.is_trained:
        together = _largest_split(job, cluster, role, ranks)
        split = [Sharding(0, together)] if together > 1 else []
        return [Sharding(0), *split, *([Sharding(3)] if len(ranks) > 1 else [])]
    if role.bound_to is not None or any(other.bound_to == name for other in job.roles.values()):
        stages = (0, 2)  # a shared base needs whole weights, and both the same ranks
    else:
        stages = (0, 2) if len(ranks) == 1 else (0, 1, 2, 3)
    return [Sharding(stage) for stage in stages]


def _largest_split(job: RLJob, cluster: Cluster, role: RoleJob, ranks: tuple[int, ...]) -> int:
    """The one size of a frozen role's tensor-parallel groups that is tried: the largest within a host."""
    if not role.can_split or (role.name == "reference" and job.config.reference.refresh_every):
        return 1
    return max(_group_sizes(ranks, cluster, role.sizes.heads))


def _group_sizes(ranks: tuple[int, ...], cluster: Cluster, heads: int) -> list[int]:
    """Sizes of groups that divide the ranks and do not cross hosts."""
    each = cluster.ranks_per_host
    return [
        size
        for size in range(1, min(len(ranks), each, heads) + 1)
        if len(ranks) % size == 0 and each % size == 0 and ranks[0] % size == 0
    ]


def tensor_parallels(job: RLJob, layout: Layout, cluster: Cluster) -> list[int]:
    """Sizes of tensor-parallel groups that divide the ranks that sample, within a host."""
    places = layout.places
    environment = job.config.environment
    if job.config.rollout.policy_lag and SAMPLER not in places:
        return [1]  # beside training on the same ranks, sampling runs no collectives
    if environment is not None and environment.path is None:
        return [1]  # a program asks one rank
    return _group_sizes(places.get(SAMPLER, places["actor"]), cluster, job.actor.sizes.heads)


def joinings(layout: Layout, cluster: Cluster, options: Options) -> tuple[bool, ...]:
    """Choices of `with_actor`: true too beside a sampler, without a lag, in groups of as many ranks."""
    places = layout.places
    together = options.tensor_parallel
    if SAMPLER not in places or options.policy_lag or together not in _group_sizes(places["actor"], cluster, together):
        return (False,)
    return (False, True)


def lags(job: RLJob, layout: Layout) -> tuple[int, ...]:
    """Policy lags: the configured one where a separate sampler allows it."""
    return (job.config.rollout.policy_lag,) if SAMPLER in layout.places else (0,)


def offloads(job: RLJob, layout: Layout) -> list[tuple[bool, bool, bool]]:
    """offload_frozen, offload_states and offload_optimizer; none first. A CPU is its own host."""
    if job.device.type == "cpu":
        return [(False, False, False)]
    separate = SAMPLER in layout.places
    found = itertools.product((False, True) if job.frozen else (False,), (False,) if separate else (False, True))
    return sorted((frozen, states, optimizer) for frozen, states in found for optimizer in (False, True))


def plan_of(layout: Layout, options: Options) -> StepPlan:
    """The plan of a layout and options."""
    shared = dict(options.shardings)
    sampling = SAMPLER if SAMPLER in layout.places else "actor"
    roles = {name: RolePlacement(ranks, *shared.get(name, Sharding(0))) for name, ranks in layout.ranks}
    for name in {sampling, "actor"} if options.with_actor else {sampling}:
        roles[name] = replace(roles[name], tensor_parallel=options.tensor_parallel)
    return StepPlan(
        Placement(roles, layout.style, options.with_actor),
        options.policy_lag,
        options.offload_frozen,
        options.offload_states,
        options.offload_optimizer,
    )


@cache
def _range(start: int, end: int) -> tuple[int, ...]:
    """One object for all layouts, so that comparing them is fast."""
    return tuple(range(start, end))


def _partitions(names: Sequence[str]) -> Iterator[list[list[str]]]:
    """All ways to divide names into groups."""
    if not names:
        yield []
        return
    first, *rest = names
    for groups in _partitions(rest):
        yield [[first], *groups]
        for place, group in enumerate(groups):
            yield [*groups[:place], [first, *group], *groups[place + 1 :]]


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All sizes of 1 or more with a sum, in order."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)
