"""The size of micro-batches on a GPU, where `train.micro_batch_tokens` is null.

Small micro-batches leave a GPU waiting for the host, which launches as many kernels for few tokens as for many. So the
size is the smallest of 8,192 x 1, 2, 4, 8 tokens at which the matrix products of a layer outlast its launches, as far
as the memory plan has room. Source: the roofline with launches as its third line (planning/step_time.py).

A run that is out of memory in spite of the plan, on a CPU too, leaves half the size to the next start in its folder,
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.training import HALVED_FILE, MICRO_BATCH_TOKENS
from hybrid_rlhf.models.pretrained.loading import training_dtype
from hybrid_rlhf.planning.device import own_device
from hybrid_rlhf.planning.dotted_keys import with_settings
from hybrid_rlhf.planning.job import dimensions
from hybrid_rlhf.planning.phase_memory import AnyStep, PhaseMemory
from hybrid_rlhf.planning.shapes import Unplannable, shaped_model
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.observability.profiling import peak_flops
from hybrid_rlhf.runtime.placement import Placement
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.runtime.world import shared_user_errors

_KEY = "train.micro_batch_tokens"
_LARGEST_SHARE = 0.85
"""Largest part of a device that a plan may fill; fragmentation takes of the rest."""
_FACTORS = (1, 2, 4, 8)
LAYER_LAUNCHES = 40
"""Kernels of a layer's forward, counted in Llama and Qwen2."""
_LAUNCH_SECONDS = 20e-6
"""Time of the host for a launch from Python: 8 to 38 microseconds were measured."""
StepT = TypeVar("StepT", bound=AnyStep)


def resolve_micro_batches(config: StepT, run: Run, placement: Placement | None = None) -> StepT:
    """The config with a size of micro-batches, which is also that of the run. Every rank calls.

    Args:
        config: of a step.
        run: its run.
        placement: of a step of RL.

    Raises:
        UserError: on every rank, when a model's config cannot be read.
    """
    if has_size(config):
        return config
    world = run.world
    with shared_user_errors(world):
        if world.is_main:
            config = _resolved(config, run, placement)
    config = world.broadcast_object(config)
    run.micro_batch_tokens = config.train.tokens_on(world.device.type)
    return config


def _resolved(config: StepT, run: Run, placement: Placement | None) -> StepT:
    world, halved = run.world, run.folder / HALVED_FILE
    why = None
    if world.device.type == "cuda":
        planner = Planner(own_device(world.size, local=world.local_size))
        try:
            config, why = with_micro_batches(config, planner, peak_flops(world.device), placement)
        except Unplannable as error:
            why = error.reason
    if halved.exists() and (tokens := int(halved.read_text())) < config.train.tokens_on(world.device.type):
        config = with_settings(config, {_KEY: tokens})
        why = f"half of the size with which this run was out of memory ({halved})"
    if why is not None:
        logger.info("%s %s: %s", _KEY, f"{config.train.tokens_on(world.device.type):,}", why)
    return config


def with_chosen_size(config: StepT, run: Run) -> StepT:
    """The config with the size of micro-batches that its run has chosen."""
    return config if run.micro_batch_tokens is None else with_settings(config, {_KEY: run.micro_batch_tokens})


def halve_micro_batches(run: Run) -> int | None:
    """Leave half the size to the next start in the run folder; returns it, None if the settings name a size or it has
    been halved."""
    halved = run.folder / HALVED_FILE
    if run.micro_batch_tokens is None or halved.exists():
        return None
    write_whole(halved, f"{run.micro_batch_tokens // 2}\n")
    return run.micro_batch_tokens // 2


def has_size(config: AnyStep) -> bool:
    """True if the settings name the size of a micro-batch."""
    return config.train.micro_batch_tokens is not None or config.train.micro_batch_size is not None


def with_micro_batches(
    config: StepT, planner: Planner, flops: float | None, placement: Placement | None = None
) -> tuple[StepT, str]:
    """The config with the size of micro-batches on a GPU, and the reason.

    Args:
        config: of a step, without a size.
        planner: of the machine.
        flops: matrix products of a device per second; None: unknown, and launches set no limit.
        placement: of a step of RL; None: that of the config.
    """
    base = MICRO_BATCH_TOKENS["cuda"]
    filling = base * _FACTORS[-1] if flops is None else filling_tokens(config, planner, flops)
    sizes = [base * factor for factor in _FACTORS if factor == 1 or base * factor / 2 < filling]
    for tokens in sizes[::-1]:
        sized = with_settings(config, {_KEY: tokens})
        if tokens == base or _has_room(_phases(sized, planner, placement)):
            break
    if tokens < sizes[-1]:
        return sized, f"the memory plan has no room for {2 * tokens:,} within {_LARGEST_SHARE:.0%} of the device"
    if flops is None:
        return sized, "the rate of this GPU is unknown, and the memory plan has room"
    return sized, f"products outlast launches from {filling:,.0f} tokens on, and the memory plan has room"


def filling_tokens(config: AnyStep, planner: Planner, flops: float) -> float:
    """Tokens from which the matrix products of a layer of the trained model outlast its launches."""
    lora = config.actor.lora if isinstance(config, RLConfig) else config.lora
    dtype = training_dtype(config.model, planner.machine.device)
    path = planner.starts.get(str(config.model.path), str(config.model.path))
    sizes = dimensions(shaped_model(path, "causal_lm", config=config.model, dtype=dtype, lora=lora, learns=True))
    weights = sizes.layer_weights * sizes.active / config.model.tensor_parallel
    return math.ceil(LAYER_LAUNCHES * _LAUNCH_SECONDS * flops / (2 * weights))


def _phases(config: AnyStep, planner: Planner, placement: Placement | None) -> Sequence[PhaseMemory]:
    if placement is not None and isinstance(config, RLConfig):
        return planner.memory(config, placement)
    return planner.phases(config)


def _has_room(phases: Sequence[PhaseMemory]) -> bool:
    """Whether all phases but generation, which takes what is free, leave a part of the device free."""
    passes = (phase for phase in phases if phase.timed_as != "generation")
    return all(phase.fits and phase.total <= _LARGEST_SHARE * phase.machine.device_bytes for phase in passes)
