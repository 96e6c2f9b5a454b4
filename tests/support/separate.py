"""A sampler on ranks of its own beside an actor, and the tensors of inference weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.separate.plane import WeightPlane
from hybrid_rlhf.engines.separate.sampler import SeparateSampler
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.runtime.world import World, create_groups
from tests.support.engines import actor_spec


def build_separate(
    world: World,
    path: Path,
    *,
    trains: int,
    idle: int = 0,
    rollout: RolloutConfig | None = None,
    samples: bool = False,
    settings: dict[str, Any] | None = None,
    **faults: Any,
) -> tuple[HybridEngine | None, SeparateSampler]:
    """The first ranks train the actor, the last do nothing, all others sample; `samples`: the actor samples too."""
    rollout = rollout or RolloutConfig()
    actor_ranks, sampler_ranks = tuple(range(trains)), tuple(range(trains, world.size - idle))
    together = rollout.tensor_parallel
    groups = [sampler_ranks[first : first + together] for first in range(0, len(sampler_ranks), together)]
    create_groups([actor_ranks, sampler_ranks, *groups])
    own, other = map(world.part, (actor_ranks, sampler_ranks))
    union = world.part(actor_ranks + sampler_ranks, own=True)
    actor = None
    if own.is_member:
        spec = actor_spec(path, **({"lr": 0.05} | (settings or {})))
        alone = RolloutConfig(routing_replay=rollout.routing_replay)
        actor = build_actor(spec, own, rollout=alone, samples=samples)
    return actor, SeparateSampler(actor, world=other, union=union, rollout=rollout, **faults)


def plane_of(sampler: SeparateSampler) -> WeightPlane:
    """What brings it the actor's weights."""
    assert sampler.plane is not None, "this rank neither trains nor samples"
    return sampler.plane


def weight_tensors(decoder: Decoder) -> dict[str, torch.Tensor]:
    """All tensors of a decoder's inference weights by their places."""
    return dict(_tensors(decoder._weights, ""))


def _tensors(item: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(item, torch.Tensor):
        yield place, item.to_dense() if item.is_mkldnn else item
    elif isinstance(item, Sequence) and not isinstance(item, str):
        for index, part in enumerate(item):
            yield from _tensors(part, f"{place}.{index}")
    elif isinstance(item, dict):
        for name, part in item.items():
            yield from _tensors(part, f"{place}.{name}")
    elif type(item).__module__.startswith("hybrid_rlhf.generation.model") or "decoder_weights" in type(item).__module__:
        yield from _tensors(vars(item), place)
