"""Whether a run keeps the inference layout between its rollouts, where it leaves that to memory.

Why: what is kept is not built again. On a GPU every rollout would else capture its decoding steps anew, up to twenty
sizes of batch. Kept memory is missing in training, so the plan of all phases decides, with the cache at the size that
it would have (memory_plan.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from hybrid_rlhf.algorithms.memory_plan import Machine, Planner
from hybrid_rlhf.algorithms.memory_report import GPU_RESERVE_GIB
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World, mistakes_shared

logger = logging.getLogger(LOGGER_NAME)


def with_keep_weights(config: PPOConfig, world: World) -> PPOConfig:
    """The config with `rollout.keep_weights` true or false; every rank calls.

    Raises:
        UserError: on every rank, when a model's config cannot be read.
    """
    if config.rollout.keep_weights != "auto":
        return config
    with mistakes_shared(world):
        fits = world.is_main and _fits(config, world)
    keep = world.broadcast_object(fits)
    if keep and world.is_main:
        logger.info("the inference layout and its captured steps stay in memory between rollouts: the plan has room")
    return replace(config, rollout=replace(config.rollout, keep_weights=keep))


def _fits(config: PPOConfig, world: World) -> bool:
    if world.device.type != "cuda" or config.rollout.layout != "auto" or config.rollout.max_staleness:
        return False
    total = torch.cuda.get_device_properties(world.device).total_memory
    machine = Machine(world.device, world.size, total - GPU_RESERVE_GIB * 2**30)
    return plan_has_room(config, machine)


def plan_has_room(config: PPOConfig, machine: Machine) -> bool:
    """Whether every phase fits with the layout and its cache kept, and all completions are decoded at once."""
    kept = replace(config, rollout=replace(config.rollout, keep_weights=True))
    return all(phase.fits and not phase.note for phase in Planner(machine).phases(kept))
