"""Settings with which a step fits into memory.

Each candidate is verified by planning again with it. One setting alone is preferred; otherwise as few as possible.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.schema import section_type
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.memory.plan import AnyStep, Device, PhaseMemory

StepT = TypeVar("StepT", bound=AnyStep, contravariant=True)
Settings = dict[str, Any]
"""Dotted keys of a step and their values."""


class PhasePlanner(Protocol[StepT]):
    """Estimates the phases of steps on a machine."""

    @property
    def machine(self) -> Device:
        """The machine."""

    def phases(self, config: StepT) -> list[PhaseMemory]:
        """See Planner."""


def remedy(planner: PhasePlanner[StepT], config: StepT) -> Settings | None:
    """Settings with which a step fits: the first candidate that suffices alone, else a minimal set; none if none do."""
    known = list(candidates(config, planner.machine.ranks))
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
    """A config with dotted keys changed; all keys of a section at once, because its rules check them together."""
    own = {key: value for key, value in settings.items() if "." not in key}
    for section in {key.partition(".")[0] for key in settings if "." in key}:
        inner = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{section}.")}
        section_class, value = section_type(typing.get_type_hints(type(config))[section]), getattr(config, section)
        assert section_class is not None
        own[section] = with_settings(section_class() if value is None else value, inner)
    return replace(config, **own)


def candidates(config: AnyStep, ranks: int) -> Iterator[Settings]:
    """Settings that may reduce the memory of a step, in order of increasing cost; each is to be applied alone."""
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
    yield from _engine_candidates(config, ranks)
    if isinstance(config, RLConfig):
        for cache_gib in (8.0, 4.0, 2.0, 1.0, 0.5):
            if config.rollout.kv_cache_gib is None or config.rollout.kv_cache_gib > cache_gib:
                yield {"rollout.kv_cache_gib": cache_gib}
        for key in ("offload_frozen", "offload_states"):
            if not getattr(config.rollout, key):
                yield {f"rollout.{key}": True}
        if ranks > 1 and config.rollout.tensor_parallel == 1:
            yield {"rollout.tensor_parallel": ranks}


def _engine_candidates(config: AnyStep, ranks: int) -> Iterator[Settings]:
    """Candidates for the engines that train. A critic follows the actor unless it has settings of its own."""
    sections: dict[str, tuple[ZeroConfig, LoraConfig | None]]
    if isinstance(config, RLConfig):
        sections = {"actor.": (config.actor.zero, config.actor.lora)}
        if config.critic is not None and (config.critic.zero is not None or config.critic.lora is not None):
            sections["critic."] = (config.critic_zero, config.critic_lora)
    else:
        sections = {"": (config.zero, config.lora)}

    def each(**settings: Any) -> Settings:
        return {section + key.replace("__", "."): value for section in sections for key, value in settings.items()}

    stages = [zero.stage for zero, _ in sections.values()]
    for stage in (2, 3):
        if ranks > 1 and min(stages) < stage:
            yield each(zero__stage=stage)
    yield each(zero__stage=max(2, *stages), zero__offload_optimizer=True)
    yield each(zero__stage=3, zero__offload_optimizer=True, zero__offload_parameters=True)
    if any(lora is None for _, lora in sections.values()):
        yield each(lora__rank=16)


def setting(config: Any, key: str) -> Any:
    """The value of a dotted key; none in a section that is not set."""
    for name in key.split("."):
        config = None if config is None else getattr(config, name)
    return config


def _merged(options: list[Settings]) -> Settings:
    return {key: value for option in options for key, value in option.items()}


def _fits(planner: PhasePlanner[StepT], config: StepT, settings: Settings) -> bool:
    try:
        return all(phase.fits for phase in planner.phases(with_settings(config, settings)))
    except UserError:  # violates a rule together with the other settings
        return False
