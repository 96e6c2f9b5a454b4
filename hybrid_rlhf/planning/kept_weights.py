"""Resolves `rollout.keep_weights: auto`: whether inference weights stay in memory between rollouts.

Kept weights are not built again, and on a GPU CUDA graphs for up to twenty batch sizes are not captured again. The
memory is missing during training, so weights are kept if the memory plan of all phases (planning/step_memory.py) has
room. A sampler with ranks of its own decides for itself (engines/separate/).
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import has_separate_sampler
from hybrid_rlhf.planning.phase_memory import GPU_RESERVE_GIB, Device
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World, shared_user_errors

logger = logging.getLogger(LOGGER_NAME)


def resolve_keep_weights(config: RLConfig, world: World) -> RLConfig:
    """The config with `rollout.keep_weights` true or false, unless the sampler has ranks of its own. Every rank calls.

    Raises:
        UserError: on every rank, when a model's config cannot be read.
    """
    if config.rollout.keep_weights != "auto" or has_separate_sampler(config.placement):
        return config
    with shared_user_errors(world):
        fits = world.is_main and _fits(config, world)
    keep = world.broadcast_object(fits)
    if keep and world.is_main:
        logger.info("inference weights and CUDA graphs stay in memory between rollouts: the memory plan has room")
    return replace(config, rollout=replace(config.rollout, keep_weights=keep))


def _fits(config: RLConfig, world: World) -> bool:
    if world.device.type != "cuda" or config.rollout.backend != "auto" or config.rollout.policy_lag:
        return False
    total = torch.cuda.get_device_properties(world.device).total_memory
    machine = Device(world.device, world.size, total - GPU_RESERVE_GIB * 2**30)
    return plan_has_room(config, machine)


def plan_has_room(config: RLConfig, machine: Device) -> bool:
    """True if every phase fits with inference weights and cache kept, and all completions are decoded at once."""
    kept = replace(config, rollout=replace(config.rollout, keep_weights=True))
    return all(phase.fits and not phase.note for phase in Planner(machine).phases(kept))
