"""Settings with which a step fits into memory.

All changes are made, in the order of their costs; those that are not needed are taken back, the costliest first, and
the rest is made as weak as possible. So a remedy is minimal: without any of its settings the step does not fit.
Moments in 8 bits change updates, and adapters what is learned, so they are advised in addition to a remedy that needs
host memory or does not exist; adapters over 4-bit weights likewise. Every remedy is verified by planning with it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.models.structure import EXPERTS
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.dotted_keys import Settings, as_options, with_settings
from hybrid_rlhf.planning.phase_memory import AnyStep, PhaseMemory
from hybrid_rlhf.planning.shapes import read_config
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.observability.progress import ProgressLog

Levels = Sequence[Settings]
"""Settings of the same keys, from the weakest to the strongest."""
Seconds = Callable[[Any], float]
"""Predicts a step."""

_MOST_RANKS = 4096
_SHORTEST_ROW = 256
"""The most ranks and the fewest tokens that `nearest` looks at."""


@dataclass(frozen=True)
class Remedy:
    """Settings with which a step fits."""

    settings: Settings
    host_bytes: float
    """The most host memory that a rank needs with them; 0 on a CPU, where the host is the device."""
    seconds: float | None = None
    """Seconds of a step with them; None: not predicted."""
    ranks: int | None = None
    """Number of ranks on which the step fits with them; None: those of the machine."""

    @property
    def uses_host(self) -> bool:
        """True if it moves memory to the host."""
        return any("offload" in key for key in self.settings)

    def in_words(self, prefix: str = "") -> str:
        """As options of the command line, with their costs."""
        words = as_options(self.settings, prefix)
        costs = [f"{self.host_bytes / 2**30:.1f} GiB of host memory per rank"] if self.host_bytes >= 2**27 else []
        costs += [] if self.seconds is None else [f"{self.seconds:.1f} s per step"]
        return f"{words} ({', '.join(costs)})" if costs else words


def remedies(planner: Planner, config: AnyStep, seconds: Seconds | None = None) -> list[Remedy]:
    """Minimal settings with which a step fits, the advised ones first; [] if no known settings suffice.

    Args:
        planner: of the machine.
        config: the step.
        seconds: predicts a step; None: it is not predicted.
    """
    found: list[Remedy] = []
    for settings in ({}, *_eight_bit(planner, config), *_adapters(config), *_four_bit(config)):
        # without any other remedy, 4-bit weights are one of the larger changes that `nearest` names
        if all(remedy.uses_host for remedy in found) and (found or "model.quantization" not in settings):
            found += _fitting(planner, config, [(planner.machine, settings)], seconds)
    return found


def nearest(planner: Planner, config: AnyStep, *, ranks_per_host: int, seconds: Seconds | None = None) -> list[Remedy]:
    """Larger changes for a step that no remedy fits: split experts, 4-bit weights, shorter rows, more ranks; each
    with its remedy, and only those with which the step fits.

    Args:
        planner: of the machine.
        config: the step.
        ranks_per_host: ranks of each host, if there are more of them.
        seconds: predicts a step on this machine.
    """
    machine = planner.machine
    split = [{"model.expert_parallel": size} for size in (8, 16, 32, 64) if machine.ranks % size == 0]
    split = split if _is_mixture(config) and config.model.expert_parallel == 1 else []
    larger = (machine.ranks * 2**power for power in range(1, 11))
    machines = [
        replace(machine, ranks=ranks, ranks_per_host=min(ranks, max(ranks_per_host, machine.cluster.ranks_per_host)))
        for ranks in larger
        if ranks <= _MOST_RANKS
    ]
    ways = [[(machine, settings) for settings in some] for some in (split, _four_bit(config), _shorter_rows(config))]
    ways.append([(more, settings) for more in machines for settings in ({}, *split[-1:])])
    return [remedy for way in ways for remedy in _fitting(planner, config, way, seconds)]


def _fitting(
    planner: Planner, config: AnyStep, ways: Sequence[tuple[Device, Settings]], seconds: Seconds | None
) -> list[Remedy]:
    """The remedy of the first machine and settings for which there is one; [] if there is none."""
    for machine, settings in ways:
        here = machine == planner.machine
        there = replace(planner, machine=machine)
        with contextlib.suppress(UserError):  # violates a rule
            changed = with_settings(config, settings)
            # a higher stage may need more: ZeRO-3 has buckets, and copies inference weights instead of using views
            tried = (_minimal(there, changed, most_zero=stage) for stage in (3, 2, 1, 0))
            if (found := next((each for each in tried if each is not None), None)) is not None:
                settings = settings | found
                changed = with_settings(config, settings)
                host = max(each.need.host for each in there.phases(changed)) if machine.device.type == "cuda" else 0.0
                taken = seconds(changed) if seconds is not None and here else None
                return [Remedy(settings, host, taken, None if here else machine.ranks)]
    return []


def _is_mixture(config: AnyStep) -> bool:
    """True if the config of the model has a number of experts."""
    with contextlib.suppress(UserError):
        model = read_config(str(config.model.path), trust_remote_code=config.model.trust_remote_code)
        return any(getattr(model.get_text_config(), key, None) for key in EXPERTS)
    return False


def _eight_bit(planner: Planner, config: AnyStep) -> list[Settings]:
    """AdamW's moments in 8 bits, on a GPU for models without adapters."""
    roles: dict[str, Any] = {"": config}
    if isinstance(config, RLConfig):
        roles = {"actor.": config.actor, "critic.": config.critic}
    learning = {prefix: role.optimizer.name for prefix, role in roles.items() if role is not None}
    whole = all(lora is None for _, lora in _engines(config).values()) and {*learning.values()} == {"adamw"}
    fits = whole and planner.machine.device.type == "cuda"
    return [{f"{prefix}optimizer.name": "adamw_8bit" for prefix in learning}] if fits else []


def _adapters(config: AnyStep) -> list[Settings]:
    """Adapters, unless all engines have them."""
    sections = _engines(config)
    missing = any(lora is None for _, lora in sections.values())
    return [{f"{section}lora.rank": 16 for section in sections}] if missing else []


def _four_bit(config: AnyStep) -> list[Settings]:
    """Adapters over 4-bit weights with gradient checkpointing, unless the weights are in 4 bits."""
    if config.model.quantization is not None:
        return []
    base: Settings = {"model.quantization": "nf4", "model.gradient_checkpointing": True}
    return [{**base, **next(iter(_adapters(config)), {})}]


def _shorter_rows(config: AnyStep) -> list[Settings]:
    """Halves of the longest row, down to 256 tokens."""
    if isinstance(config, RLConfig):
        return _halves("rollout.sampling.max_new_tokens", config.rollout.sampling.max_new_tokens, least=_SHORTEST_ROW)
    return _halves("data.max_length", config.data.max_length, least=_SHORTEST_ROW)


def _halves(key: str, value: int, *, least: int) -> list[Settings]:
    """Settings of a key with half of a value, a quarter and so on, down to a limit."""
    return [{key: value // 2**power} for power in range(1, 30) if value // 2**power >= least]


def _minimal(planner: Planner, config: AnyStep, *, most_zero: int) -> Settings | None:
    """The fewest and weakest changes that suffice, with ZeRO up to a stage; None if no changes do."""
    known: dict[tuple[Any, ...], list[PhaseMemory]] = {}
    tried = [levels for levels in _changes(config, planner.machine, most_zero=most_zero) if levels]
    most = sum(2 + len(levels) for levels in tried)
    progress = ProgressLog(f"looking for settings that fit, ZeRO {most_zero}", total=most, unit="settings")

    def phases(settings: Settings) -> list[PhaseMemory]:
        """The phases of a step; [] if settings violate a rule together with the others."""
        key = tuple(sorted(settings.items()))
        if key not in known:
            progress.advance()
            known[key] = []
            with contextlib.suppress(UserError):
                known[key] = planner.phases(with_settings(config, settings))
        return known[key]

    def fits(settings: Settings, *, device_alone: bool = False) -> bool:
        """`device_alone`: ignore host memory, of which changes need more, not less."""
        found = phases(settings)
        on_device = all(phase.total <= phase.machine.device_bytes for phase in found)
        return bool(found) and (on_device if device_alone else all(phase.fits for phase in found))

    changes: list[Levels] = []
    for levels in tried:
        if phases(_strongest([*changes, levels])):
            changes.append(levels)
    if not fits(_strongest(changes), device_alone=True):
        return None
    for levels in changes[::-1]:
        rest = [each for each in changes if each is not levels]
        if fits(_strongest(rest), device_alone=True):
            changes = rest
    settings = _strongest(changes)
    for levels in changes:
        settings |= next((level for level in levels if fits(settings | level)), {})
    return settings if fits(settings) else None


def _strongest(changes: Sequence[Levels]) -> Settings:
    return {key: value for levels in changes for key, value in levels[-1].items()}


def candidates(config: AnyStep, machine: Device) -> Iterator[Settings]:
    """Settings that may reduce the memory of a step, the cheapest first; each is to be applied alone."""
    yield from itertools.chain.from_iterable([*_changes(config, machine), _adapters(config)])


def _changes(config: AnyStep, machine: Device, *, most_zero: int = 3) -> Iterator[Levels]:
    """Changes that reduce the memory of a step, the cheapest first."""
    checkpointing: Settings = {"model.gradient_checkpointing": True}
    if not config.model.gradient_checkpointing:
        yield [checkpointing]
    if config.train.micro_batch_size is None:
        yield _halves("train.micro_batch_tokens", config.train.tokens_on(machine.device.type), least=512)
    else:
        yield _halves("train.micro_batch_size", config.train.micro_batch_size, least=1)
    if not config.model.activation_offload:
        yield [{"model.activation_offload": True, **checkpointing}]
    least = min(zero.stage for zero, _ in _engines(config).values())
    yield [_each(config, "zero.stage", stage) for stage in (1, 2, 3) if least < stage <= most_zero]
    if isinstance(config, RLConfig):
        yield [
            {"rollout.tensor_parallel": each}
            for each in tensor_parallel_sizes(machine, above=config.rollout.tensor_parallel)
        ]
        most = config.rollout.kv_cache_gib
        # without a size the cache takes what is left, which on a small device is less than a size that is set
        limit = machine.device_bytes / 2**30 / 4 if most is None else most
        yield [{"rollout.kv_cache_gib": each} for each in (8.0, 4.0, 2.0, 1.0, 0.5) if each < limit]
        for key in ("offload_frozen", "offload_states"):
            if not getattr(config.rollout, key):
                yield [{f"rollout.{key}": True}]
    for key in ("offload_optimizer", "offload_parameters"):
        if not all(getattr(zero, key) for zero, _ in _engines(config).values()):
            yield [_each(config, f"zero.{key}", True)]


def tensor_parallel_sizes(machine: Device, *, above: int = 1) -> list[int]:
    """Sizes of tensor-parallel groups: powers of two that divide the ranks of a host, and its ranks; then whole
    hosts."""
    local = machine.cluster.ranks_per_host
    within = [size for size in {*(2**power for power in range(12)), local} if size <= local and local % size == 0]
    across = [local * hosts for hosts in range(2, machine.ranks // local + 1) if machine.ranks // local % hosts == 0]
    return sorted(size for size in {*within, *across} if size > above and machine.ranks % size == 0)


def _engines(config: AnyStep) -> dict[str, tuple[ZeroConfig, LoraConfig | None]]:
    """Sections of the engines that train, by their prefix. A critic without own settings follows the actor."""
    if not isinstance(config, RLConfig):
        return {"": (config.zero, config.lora)}
    sections = {"actor.": (config.actor.zero, config.actor.lora)}
    if config.critic is not None and (config.critic.zero is not None or config.critic.lora is not None):
        sections["critic."] = (config.critic_zero, config.critic_lora)
    return sections


def _each(config: AnyStep, key: str, value: Any) -> Settings:
    return {section + key: value for section in _engines(config)}
