"""Decisions of an RL run that depend on memory, before any model is loaded.

The memory of every rank in every phase comes from configs alone (planning/step_memory.py). It is an upper bound, as
all rows have the maximum length.
"""

from __future__ import annotations

import contextlib

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import has_separate_sampler, in_words
from hybrid_rlhf.planning.device import Device, own_device
from hybrid_rlhf.planning.dotted_keys import with_settings
from hybrid_rlhf.planning.phase_memory import largest_misfit
from hybrid_rlhf.planning.remedies import remedies
from hybrid_rlhf.planning.shapes import Unplannable
from hybrid_rlhf.planning.step_memory import Planner, lacks_kv_cache
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.placement import Placement
from hybrid_rlhf.runtime.world import World, shared_user_errors

_GIB = 2**30


def require_room(config: RLConfig, placement: Placement, world: World) -> None:
    """Check the memory of GPUs; without a placement in the config, what does not fit is a warning. Every rank calls.

    Raises:
        UserError: on every rank, when a phase of the placement that the config names does not fit.
    """
    if world.device.type != "cuda":
        return
    with shared_user_errors(world):
        fault = None
        if world.is_main:
            try:
                fault = misfit(config, placement, own_device(world.size, local=world.local_size))
            except Unplannable as error:
                logger.warning("memory is not checked before the run: %s", error.reason)
        if fault is not None and config.placement is not None:
            raise UserError(fault)
        if fault is not None:
            logger.warning("%s", fault)


def misfit(config: RLConfig, placement: Placement, machine: Device) -> str | None:
    """A line on the phase where most memory is missing, and settings that fit; None if everything fits."""
    planner = Planner(machine)
    phase = largest_misfit(planner.memory(config, placement))
    if phase is None:
        return None
    room = phase.tightest
    where = "its share of the host" if room.of_host else "its GPU"
    found = remedies(planner, config)
    advice = "set " + " or ".join(each.in_words() for each in found) if found else "use more ranks, or a smaller model"
    ranks = f"rank{'s' * (len(phase.ranks) > 1)} {in_words(phase.ranks)}"
    return (
        f"placement {placement.style} must fit into memory, {phase.name} on {ranks} needs "
        f"{room.needed / _GIB:.2f} GiB, {room.missing / _GIB:.2f} more than {where} has: {advice}"
    )


def resolve_kv_cache(config: RLConfig, placement: Placement, world: World) -> RLConfig:
    """The config with the size of the KV cache, if a thread samples beside training. Every rank calls.

    Such a thread cannot take what is free when it starts: training would find that memory taken. So the memory plan of
    all phases decides.

    Raises:
        UserError: on every rank, when a model's config cannot be read, or its memory cannot be planned.
    """
    if not lacks_kv_cache(config, placement):
        return config
    with shared_user_errors(world):
        if world.is_main:
            planner = Planner(own_device(world.size, local=world.local_size))
            try:
                config = planner.with_kv_cache(config, placement)
            except Unplannable as error:
                raise UserError(
                    f"sampling beside training needs a size of its KV cache, {error.reason}: set rollout.kv_cache_gib"
                ) from error
            notes = {each.note for each in planner.memory(config, placement)} - {""}
            logger.info(
                "rollout.kv_cache_gib %g: by the memory plan, %s",
                config.rollout.kv_cache_gib,
                "; ".join(sorted(notes)) or "for all completions of a rollout at full length",
            )
    return world.broadcast_object(config)


def resolve_keep_weights(config: RLConfig, world: World) -> RLConfig:
    """The config with `rollout.keep_weights` true or false, unless the sampler has ranks of its own, which decides for
    itself (engines/separate/). Every rank calls.

    Kept weights are not built again, and on a GPU CUDA graphs for up to twenty batch sizes are not captured again. The
    memory is missing during training, so weights are kept if the memory plan of all phases has room.

    Raises:
        UserError: on every rank, when a model's config cannot be read.
    """
    if config.rollout.keep_weights != "auto" or has_separate_sampler(config.placement):
        return config
    keep = False
    with shared_user_errors(world):
        rollout = config.rollout
        if world.is_main and world.device.type == "cuda" and rollout.backend == "auto":
            with contextlib.suppress(Unplannable):
                kept = with_settings(config, {"rollout.keep_weights": True})
                phases = Planner(own_device(world.size, local=world.local_size)).phases(kept)
                keep = all(phase.fits and not phase.note for phase in phases)  # a note: not all rows at once
    keep = world.broadcast_object(keep)
    if keep and world.is_main:
        logger.info("inference weights and CUDA graphs stay in memory between rollouts: the memory plan has room")
    return with_settings(config, {"rollout.keep_weights": keep})
