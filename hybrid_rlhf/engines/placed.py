"""Engines on ranks of their own: a sampler for an actor, and a copy of the critic.

Their users see the interfaces alone, not how weights reach these ranks (separate/).
"""

from __future__ import annotations

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.residency.rules import RoleResidency
from hybrid_rlhf.engines.role_model import Actor, Reader, RoleModel
from hybrid_rlhf.engines.sampling_engine import SamplingEngine
from hybrid_rlhf.engines.separate.critic_copy import CriticCopy
from hybrid_rlhf.engines.separate.sampler import SeparateSampler
from hybrid_rlhf.generation.image_loading import ModelImages
from hybrid_rlhf.runtime.placement import CRITIC_COPY, Placement
from hybrid_rlhf.runtime.world import World


def build_separate_sampler(
    actor: Actor,
    placement: Placement,
    *,
    world: World,
    rollout: RolloutConfig,
    residency: RoleResidency,
    max_logprob_diff: float | None,
    weight_check_every: int,
    check_weights: bool,
    images: ModelImages | None = None,
) -> SamplingEngine:
    """The sampler of a placement; `world` has all ranks, each of which calls. Arguments and errors as of
    SeparateSampler."""
    return SeparateSampler(
        actor,
        world=world.part(placement.sampler.ranks),
        rollout=rollout,
        max_logprob_diff=max_logprob_diff,
        weight_check_every=weight_check_every,
        check_weights=check_weights,
        residency=residency,
        images=images,
    )


def build_critic_copy(critic: RoleModel, placement: Placement, *, world: World, check_weights: bool) -> Reader:
    """The critic's copy of a placement; `world` has all ranks, each of which calls. Arguments and errors as of
    CriticCopy."""
    copy = placement[CRITIC_COPY]
    return CriticCopy(
        critic,
        world=world.part(copy.ranks),
        tensor_parallel=copy.tensor_parallel,
        check_weights=check_weights,
    )
