"""The plans that a search looks at.

Roles are divided into those on all ranks and groups on disjoint ranges of consecutive ranks, the largest range first,
so that ranges begin at hosts where sizes allow; a separate sampler is in another group than the actor. With this come
ZeRO stages, tensor parallelism of the sampler, and settings that offload. HybridFlow (arXiv 2409.19256, algorithm 1)
enumerates the same set partitions, without roles on all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from hybrid_rlhf.configs.sections.placement import ZeroStage
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import RLJob
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan, style_of
from hybrid_rlhf.runtime.placement import Placement, RolePlacement

PARTS = 16
"""Up to so many ranks every size of a range is tried; beyond, multiples of at least a part of the ranks."""


@dataclass(frozen=True)
class Layout:
    """The ranks of each role."""

    places: Mapping[str, tuple[int, ...]]
    style: str

    @cached_property
    def classes(self) -> list[list[str]]:
        """The roles of each set of ranks that hold the same ones."""
        firsts = sorted({ranks[0] for ranks in self.places.values()})
        return [[name for name, ranks in self.places.items() if ranks[0] <= first <= ranks[-1]] for first in firsts]


class Sharding(NamedTuple):
    """How the ranks of a role share its weights."""

    zero: ZeroStage


class Offload(NamedTuple):
    """What a plan offloads, as the fields of StepPlan with these names."""

    offload_frozen: bool = False
    offload_states: bool = False
    offload_optimizer: bool = False


NOTHING = Offload()


def unit_of(cluster: Cluster) -> int:
    """Ranks by which ranges grow."""
    if cluster.ranks <= PARTS:
        return 1
    least = math.ceil(cluster.ranks / PARTS)
    divisors = [size for size in range(least, cluster.ranks + 1) if cluster.ranks % size == 0]
    return next(size for size in divisors if cluster.ranks_per_host % size == 0 or size % cluster.ranks_per_host == 0)


def _placed(job: RLJob, everywhere: Sequence[str], groups: Sequence[tuple[Sequence[str], int]], ranks: int) -> Layout:
    """A layout of roles on all ranks and groups of roles on ranges of the given sizes."""
    found = dict.fromkeys(everywhere, _range(0, ranks))
    start = 0
    for names, size in sorted(groups, key=lambda group: -group[1]):
        found |= dict.fromkeys(names, _range(start, start + size))
        start += size
    for role in job.roles.values():
        if role.bound_to is not None:
            found[role.name] = found[role.bound_to]
    return Layout(dict(sorted(found.items())), style_of(found, ranks))


def layouts(job: RLJob, cluster: Cluster) -> Iterator[Layout]:
    """All layouts; flattening first, and alone with experts that ranks split. A 4-bit base has no separate sampler."""
    free = [role.name for role in job.roles.values() if role.bound_to is None]
    yield _placed(job, free, (), cluster.ranks)
    if job.config.model.expert_parallel > 1:
        return
    unit = unit_of(cluster)
    # a thread that samples ahead needs ranks on which nothing trains
    apart = {"actor", "critic"} if job.config.rollout.overlap_steps else {"actor"}
    for names in (free, *([[*free, SAMPLER]] if job.config.model.quantization is None else [])):
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
                        yield _placed(job, everywhere, sized, cluster.ranks)


def shardings(job: RLJob, name: str, ranks: tuple[int, ...]) -> list[Sharding]:
    """How a role may be shared by its ranks, from the fastest compute to the least memory; a stage that shards nothing
    serves offloading alone."""
    stages: tuple[ZeroStage, ...]
    if name == SAMPLER:
        return [Sharding(0)]
    role = job.roles[name]
    if not role.is_trained:
        return [Sharding(0), *([Sharding(3)] if len(ranks) > 1 else [])]
    if role.bound_to is not None or any(other.bound_to == name for other in job.roles.values()):
        stages = (0, 2)  # a shared base needs whole weights, and both the same ranks
    else:
        stages = (0, 2) if len(ranks) == 1 else (0, 1, 2, 3)
    return [Sharding(stage) for stage in stages]


def _group_sizes(ranks: tuple[int, ...], cluster: Cluster, heads: int) -> list[int]:
    """Sizes of groups that divide the ranks and do not cross hosts."""
    each = cluster.ranks_per_host
    return [
        size
        for size in range(1, min(len(ranks), each, heads) + 1)
        if len(ranks) % size == 0 and each % size == 0 and ranks[0] % size == 0
    ]


def samplings(job: RLJob, layout: Layout, cluster: Cluster) -> list[int]:
    """Sizes of tensor-parallel groups that divide the ranks that sample, within a host."""
    places = layout.places
    environment = job.config.environment
    sizes = _group_sizes(places.get(SAMPLER, places["actor"]), cluster, job.actor.sizes.heads)
    if environment is not None and environment.path is None:
        sizes = [1]  # a program asks one rank
    return sizes


def lag_of(job: RLJob, layout: Layout) -> int:
    """Steps by which a sampler on ranks of its own works ahead; sampling on the actor's ranks does not."""
    return job.config.rollout.overlap_steps if SAMPLER in layout.places else 0


def offloads(job: RLJob, layout: Layout) -> list[Offload]:
    """What may be offloaded; nothing first. A CPU is its own host."""
    if job.device.type == "cpu":
        return [Offload()]
    frozen = (False, True) if job.frozen else (False,)
    states = (False,) if SAMPLER in layout.places or lag_of(job, layout) else (False, True)
    return [Offload(*each) for each in itertools.product(frozen, states, (False, True))]


def plan_of(
    job: RLJob,
    layout: Layout,
    shared: Mapping[str, Sharding],
    *,
    together: int = 1,
    offload: Offload = NOTHING,
) -> StepPlan:
    """The plan of a layout, how its roles are shared, ranks that sample together and what is offloaded."""
    sampler = SAMPLER if SAMPLER in layout.places else "actor"
    roles = {name: RolePlacement(ranks, *shared.get(name, Sharding(0))) for name, ranks in layout.places.items()}
    roles[sampler] = replace(roles[sampler], tensor_parallel=together)
    return StepPlan(Placement(roles, layout.style), lag_of(job, layout), *offload)


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


def _compositions(total: int, parts: int) -> Iterator[list[int]]:
    """All sizes of 1 or more with a sum, in order."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield [after - before for before, after in itertools.pairwise((0, *cuts, total))]
