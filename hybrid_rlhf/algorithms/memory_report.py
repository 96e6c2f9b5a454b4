"""The memory plan of a pipeline as a table, and for what does not fit the settings that make it fit.

A remedy is found by planning again with it: one setting alone where one is enough, else as few as do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from hybrid_rlhf.algorithms.memory_plan import AnyStep, Machine, Phase, Planner
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.pipeline import PipelineConfig, has_model, start_of
from hybrid_rlhf.configs.ppo import PPOConfig

Settings = dict[str, Any]
"""Dotted keys of a step and their values."""
GPU_RESERVE_GIB = 2.0
"""Of a GPU, what CUDA, its libraries and gaps between tensors take; an assumption."""
_COLUMNS = ("weights", "gradients", "optimizer", "activations", "layout", "cache", "buffers")


def report(config: PipelineConfig, steps: Mapping[str, AnyStep]) -> tuple[list[str], bool]:
    """The plan of the steps that would run.

    Args:
        config: of the pipeline.
        steps: all of them, resolved, in the order of the pipeline.

    Returns:
        lines, and whether everything fits.
    """
    machine = this_machine(config)
    planner = Planner(machine, starts=_starts(steps))
    host = "" if machine.host_bytes is None else f", {_gib(machine.host_bytes)} of host memory"
    lines = [
        f"memory plan in GiB of a rank: {machine.ranks} x {machine.device.type} of {_gib(machine.device_bytes)}{host}",
        f"{'phase':18}" + "".join(f"{name:>12}" for name in (*_COLUMNS, "total", "host")) + "  fits",
    ]
    good = True
    for name in config.step_names:
        phases = planner.phases(steps[name])
        lines += map(_line, phases)
        if not all(phase.fits for phase in phases):
            good = False
            lines.append(f"  {_advice(planner, name, steps[name])}")
    return lines, good


def _starts(steps: Mapping[str, AnyStep]) -> dict[str, str]:
    """Folders that steps will write, each with a model that is there now and has the shape of what will be in it."""
    starts: dict[str, str] = {}
    for step in steps.values():
        start = start_of(step)
        if start is not None and not has_model(step.output_dir):
            starts[step.output_dir] = starts.get(start, start)
    return starts


def this_machine(config: PipelineConfig) -> Machine:
    """What a rank of the run has, or of the machine that plan_device_gib and plan_ranks describe."""
    gpus = torch.cuda.device_count()
    ranks = config.plan_ranks or _ranks(config) or max(gpus, 1)
    if config.plan_device_gib is not None:
        return Machine(torch.device("cuda"), ranks, (config.plan_device_gib - GPU_RESERVE_GIB) * 2**30)
    local = ranks if config.launcher.hostfile is None else max(gpus, 1)
    free = psutil.virtual_memory().available / local
    if not gpus:
        return Machine(torch.device("cpu"), ranks, free)
    total = torch.cuda.get_device_properties(0).total_memory
    return Machine(torch.device("cuda"), ranks, total - GPU_RESERVE_GIB * 2**30, free)


def _ranks(config: PipelineConfig) -> int | None:
    file = config.launcher.hostfile
    if file is None:
        return config.launcher.num_processes
    return sum(int(slots) for slots in re.findall(r"slots=(\d+)", Path(file).read_text()))


def remedy(planner: Planner, config: AnyStep) -> Settings | None:
    """The settings that make a step fit: the first of the list that does alone, else as few as are needed; none if
    none do.
    """
    known = list(options(config, planner.machine.ranks))
    for option in known:
        if _fits(planner, config, option):
            return option
    chosen: list[Settings] = []
    for option in known:
        chosen.append(option)
        if _fits(planner, config, _merged(chosen)):
            break
    else:
        return None
    for option in list(chosen[:-1]):
        without = [other for other in chosen if other is not option]
        if _fits(planner, config, _merged(without)):
            chosen = without
    return _merged(chosen)


def with_settings(config: Any, settings: Settings) -> Any:
    """A config with dotted keys changed; the keys of a section change at once, as its rules see all of them."""
    own = {key: value for key, value in settings.items() if "." not in key}
    for section in {key.partition(".")[0] for key in settings if "." in key}:
        inner = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{section}.")}
        own[section] = with_settings(getattr(config, section), inner)
    return replace(config, **own)


def options(config: AnyStep, ranks: int) -> Iterator[Settings]:
    """What may make a step smaller, the cheapest first; each as if it stood alone."""
    if not config.model.gradient_checkpointing:
        yield {"model.gradient_checkpointing": True}
    tokens = config.train.micro_batch_tokens // 2
    while config.train.micro_batch_size is None and tokens >= 512:
        yield {"train.micro_batch_tokens": tokens}
        tokens //= 2
    rows = (config.train.micro_batch_size or 1) // 2
    while rows >= 1:
        yield {"train.micro_batch_size": rows}
        rows //= 2
    if not config.model.activation_offload:
        yield {"model.gradient_checkpointing": True, "model.activation_offload": True}
    yield from _role_options(config, ranks)
    if isinstance(config, PPOConfig):
        for cache_gib in (8.0, 4.0, 2.0, 1.0, 0.5):
            if config.rollout.kv_cache_gib is None or config.rollout.kv_cache_gib > cache_gib:
                yield {"rollout.kv_cache_gib": cache_gib}
        for key in ("offload_frozen", "offload_states"):
            if not getattr(config.rollout, key):
                yield {f"rollout.{key}": True}
        if ranks > 1 and config.rollout.tensor_parallel == 1:
            yield {"rollout.tensor_parallel": ranks}


def _role_options(config: AnyStep, ranks: int) -> Iterator[Settings]:
    """Those of the engines that learn."""
    sections = ("actor.", "critic.") if isinstance(config, PPOConfig) else ("",)

    def each(**settings: Any) -> Settings:
        return {section + key.replace("__", "."): value for section in sections for key, value in settings.items()}

    stages = [_zero(config, section) for section in sections]
    for stage in (2, 3):
        if ranks > 1 and min(stages) < stage:
            yield each(zero__stage=stage)
    yield each(zero__stage=max(2, *stages), zero__offload_optimizer=True)
    yield each(zero__stage=3, zero__offload_optimizer=True, zero__offload_parameters=True)
    if any(_section(config, f"{section}lora").rank == 0 for section in sections):
        yield each(lora__rank=16)


def _zero(config: AnyStep, section: str) -> int:
    return int(_section(config, f"{section}zero").stage)


def _section(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _merged(options: list[Settings]) -> Settings:
    return {key: value for option in options for key, value in option.items()}


def _fits(planner: Planner, config: AnyStep, settings: Settings) -> bool:
    try:
        changed = with_settings(config, settings)
    except UserError:  # against a rule, with what the user has set
        return False
    return all(phase.fits for phase in planner.phases(changed))


def _advice(planner: Planner, name: str, config: AnyStep) -> str:
    settings = remedy(planner, config)
    if settings is None:
        return f"{name} does not fit, nor does any of its settings make it: take more ranks or a smaller model"
    words = " ".join(f"--{name}.{key} {str(value).lower()}" for key, value in settings.items())
    return f"{name} fits with {words}"


def _line(phase: Phase) -> str:
    values = [getattr(phase.need, name) for name in _COLUMNS] + [phase.total, phase.need.host]
    fits = "yes" if phase.fits else "NO"
    return f"{phase.name:18}" + "".join(f"{_gib(value):>12}" for value in values) + f"  {fits} {phase.note}".rstrip()


def _gib(value: float) -> str:
    return f"{value / 2**30:.2f}"
