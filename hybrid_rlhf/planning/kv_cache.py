"""Resolves `rollout.kv_cache_gib: null` of asynchronous sampling, before any model is loaded.

Sampling beside training cannot take what is free when it starts: training would find that memory taken. So the memory
plan of all phases decides.
"""

from __future__ import annotations

import logging

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.planning.phase_memory import own_device
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.placement import Placement
from hybrid_rlhf.runtime.world import World, shared_user_errors

logger = logging.getLogger(LOGGER_NAME)


def resolve_kv_cache(config: RLConfig, placement: Placement, world: World) -> RLConfig:
    """The config with the size of the KV cache, if a thread samples beside training. Every rank calls.

    Raises:
        UserError: on every rank, when a model's config cannot be read.
    """
    if not config.rollout.policy_lag or config.rollout.kv_cache_gib is not None:
        return config
    with shared_user_errors(world):
        if world.is_main:
            planner = Planner(own_device(world.size, local=world.local_size))
            config = planner.with_kv_cache(config, placement)
            notes = {each.phase.note for each in planner.memory(config, placement)} - {""}
            logger.info(
                "rollout.kv_cache_gib %g: by the memory plan, %s",
                config.rollout.kv_cache_gib,
                "; ".join(sorted(notes)) or "for all completions of a rollout at full length",
            )
    return world.broadcast_object(config)
