"""Settings with which a step fits into memory.

A remedy is minimal: without any of its settings the step does not fit. Of the minimal ones the fastest is advised, as a
time model predicts it; without one, that with the fewest settings, in order of increasing cost. Adapters change what is
learned, so they are advised beside what trains all weights, where that needs host memory or does not exist; so are
adapters over 4-bit weights beside these. Every remedy is verified by planning again with it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.models.structure import EXPERTS
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.dotted_keys import Settings, with_settings
from hybrid_rlhf.planning.memo import once_for
from hybrid_rlhf.planning.phase_memory import AnyStep, PhaseMemory
from hybrid_rlhf.planning.shapes import read_config
from hybrid_rlhf.planning.step_memory import Planner

_MORE_SETTINGS = 1
"""How many more settings than the smallest remedy another one may have to be looked at."""
_UNEVEN = ("zero.stage", "rollout.tensor_parallel")
"""Changes of which more may need more memory elsewhere: ZeRO-3 copies inference weights, where others use views."""
_ADAPTERS = "lora"
_MOST_RANKS = 4096
_SHORTEST_ROW = 256
"""The most ranks and the fewest tokens that `nearest` looks at."""


@dataclass(frozen=True)
class Remedy:
    """Settings with which a step fits."""

    settings: Settings
    host_bytes: float
    """The most host memory that a rank needs with them; of a CPU 0, as it is the device."""
    seconds: float | None = None
    """Seconds of a step with them; none: not predicted."""
    ranks: int | None = None
    """Number of ranks on which the step fits with them; none: those of the machine."""

    @property
    def uses_host(self) -> bool:
        """True if it moves memory to the host."""
        return any("offload" in key for key in self.settings)

    def in_words(self, prefix: str = "") -> str:
        """As options of the command line, with what they cost."""
        words = " ".join(f"--{prefix}{key} {str(value).lower()}" for key, value in self.settings.items())
        costs = [f"{self.host_bytes / 2**30:.1f} GiB of host memory per rank"] if self.host_bytes >= 2**27 else []
        costs += [] if self.seconds is None else [f"{self.seconds:.1f} s per step"]
        return f"{words} ({', '.join(costs)})" if costs else words


@dataclass(frozen=True)
class _Change:
    """What may be changed, from least to most."""

    name: str
    levels: Sequence[Settings]
    need: str | None = None
    """A change without which it is not allowed."""

    def changes(self, settings: Settings) -> bool:
        """True if settings have its keys."""
        return self.levels[0].keys() <= settings.keys()


def remedies(planner: Planner, config: AnyStep, seconds: Callable[[Any], float] | None = None) -> list[Remedy]:
    """Minimal settings with which a step fits, the advised ones first; [] if no known settings do.

    Args:
        planner: of the machine.
        config: the step.
        seconds: predicts a step; none: costs are in the order of `_changes`.
    """
    search = _RemedySearch(planner, config, seconds)
    found: list[Remedy] = []
    for adapters in (False, True):
        if all(remedy.uses_host for remedy in found):
            found += filter(None, [search.best(adapters=adapters)])
    if found and all(remedy.uses_host for remedy in found):
        ways = [(planner.machine, settings) for settings in _four_bit(config)]
        found += filter(None, [_first_that_fits(planner, config, ways, seconds)])
    return found


def nearest(
    planner: Planner,
    config: AnyStep,
    *,
    ranks_per_host: int,
    seconds: Callable[[Any], float] | None = None,
) -> list[Remedy]:
    """What comes nearest to a step for which there is no remedy, each with the remedies that it needs besides: split
    experts, adapters over 4-bit weights, shorter rows, and more ranks; without those with which it does not fit either.

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
    ways = [
        [(machine, settings) for settings in split],
        [(machine, settings) for settings in _four_bit(config)],
        [(machine, settings) for settings in _shorter_rows(config)],
        [(more, settings) for more in machines for settings in ({}, *split[-1:])],
    ]
    fitting = (_first_that_fits(planner, config, way, seconds) for way in ways)
    return [remedy for remedy in fitting if remedy is not None]


def _first_that_fits(
    planner: Planner,
    config: AnyStep,
    way: Sequence[tuple[Device, Settings]],
    seconds: Callable[[Any], float] | None,
) -> Remedy | None:
    """The first machine and settings with which a step fits, with the remedies that it needs besides."""
    for machine, settings in way:
        try:
            changed = with_settings(config, settings)
        except UserError:  # violates a rule
            continue
        here = machine == planner.machine
        search = _RemedySearch(replace(planner, machine=machine), changed, seconds if here else None)
        remedy = search.best(adapters=False)
        if remedy is not None:
            return replace(remedy, settings={**settings, **remedy.settings}, ranks=None if here else machine.ranks)
    return None


def _is_mixture(config: AnyStep) -> bool:
    """True if the config of the model has a number of experts."""
    with contextlib.suppress(UserError):
        model = read_config(str(config.model.path), trust_remote_code=config.model.trust_remote_code)
        return any(getattr(model.get_text_config(), key, None) for key in EXPERTS)
    return False


def _four_bit(config: AnyStep) -> list[Settings]:
    """Adapters over 4-bit weights, which checkpoint, unless the step has these."""
    if config.model.quantization is not None:
        return []
    changes = (change for change in _engine_changes(config) if change.name == _ADAPTERS)
    base = {"model.quantization": "nf4", "model.gradient_checkpointing": True}
    return [{**base, **next((change.levels[0] for change in changes), {})}]


def _shorter_rows(config: AnyStep) -> list[Settings]:
    """Halves of the longest row, down to 256 tokens."""
    if isinstance(config, RLConfig):
        key, longest = "rollout.sampling.max_new_tokens", config.rollout.sampling.max_new_tokens
    else:
        key, longest = "data.max_length", config.data.max_length
    return _halves(key, longest, least=_SHORTEST_ROW)


def _halves(key: str, value: int, *, least: int) -> list[Settings]:
    """Settings of a key with half of a value, a quarter and so on, down to a limit."""
    return [{key: value // 2**power} for power in range(1, 30) if value // 2**power >= least]


class _RemedySearch:
    """Plans a step with settings, each once."""

    def __init__(self, planner: Planner, config: AnyStep, seconds: Callable[[Any], float] | None) -> None:
        self._planner = planner
        self._config = config
        self._seconds = seconds
        self._changes: dict[str, _Change] = {}
        for change in _changes(config, planner.machine):
            # of those that need another, the rules are not looked at yet
            levels = [level for level in change.levels if change.need or self._is_valid(level)]
            if levels:
                self._changes[change.name] = replace(change, levels=levels)

    def best(self, *, adapters: bool) -> Remedy | None:
        """The advised remedy, with adapters or without; none: there is none."""
        if adapters and _ADAPTERS not in self._changes:
            return None
        base = self._changes[_ADAPTERS].levels[0] if adapters else {}
        uneven = [[{}, *self._changes[name].levels] for name in _UNEVEN if name in self._changes]
        even = [name for name in self._changes if name not in (*_UNEVEN, _ADAPTERS)]
        found: list[Settings] = []
        for chosen in itertools.product(*uneven):
            fixed = _merged([base, *chosen])
            for names in self._minimal(even, fixed):
                settings = self._weakened(names, fixed)
                if self._fits(settings) and self._is_minimal(settings) and settings not in found:
                    found.append(settings)
        return self._remedy(min(found, key=self._order)) if found else None

    def _minimal(self, even: Sequence[str], fixed: Settings) -> Iterator[tuple[str, ...]]:
        """Sets of changes that suffice for the device beside fixed ones, at their strongest, and of which none can be
        left out."""

        def fits(names: Sequence[str]) -> bool:
            return self._fits(self._strongest(names, fixed), device_alone=True)

        every = self._closed([name for name in even if self._suits(name, fixed)], fixed)
        if not fits(every):
            return
        needed = [name for name in every if not fits(self._closed([other for other in every if other != name], fixed))]
        optional = [name for name in every if name not in needed]
        found: list[set[str]] = []
        for count in range(len(optional) + 1):
            if found and len(needed) + count > len(found[0]) + _MORE_SETTINGS:
                return
            for more in itertools.combinations(optional, count):
                names = tuple(name for name in every if name in needed or name in more)
                if self._closed(names, fixed) != names or any(each <= {*names} for each in found):
                    continue
                if fits(names):
                    found.append({*names})
                    yield names

    def _closed(self, names: Collection[str], fixed: Settings) -> tuple[str, ...]:
        """The changes without those that need a missing one; what they need needs no other."""
        given = {name for name, change in self._changes.items() if change.levels[0].keys() & fixed.keys()}
        allowed = {None, *names, *given}
        return tuple(name for name in self._changes if name in names and self._changes[name].need in allowed)

    def _suits(self, name: str, fixed: Settings) -> bool:
        """True if the rules allow a change beside fixed ones."""
        change = self._changes[name]
        return self._is_valid(_needed(change, self._changes) | change.levels[-1] | fixed)

    def _strongest(self, names: Collection[str], fixed: Settings) -> Settings:
        return _merged([fixed, *(self._changes[name].levels[-1] for name in names)])

    def _weakened(self, names: Sequence[str], fixed: Settings) -> Settings:
        """The settings of changes, each no stronger than the others need it to be."""
        settings = self._strongest(names, fixed)
        for name in names:
            for level in self._changes[name].levels:
                if self._fits(settings | level):
                    settings = settings | level
                    break
        return settings

    def _is_minimal(self, settings: Settings) -> bool:
        """True if no change can be left out."""
        changed = [each for each in self._changes.values() if each.changes(settings)]
        return not any(
            self._fits({key: value for key, value in settings.items() if key not in each.levels[0]}) for each in changed
        )

    def _order(self, settings: Settings) -> tuple[float, ...]:
        """The less the better: predicted seconds, or the number of settings and their costs."""
        used = [(cost, each) for cost, each in enumerate(self._changes.values()) if each.changes(settings)]
        taken = 0.0 if self._seconds is None else self._seconds(with_settings(self._config, settings))
        levels = [
            next(n for n, level in enumerate(each.levels) if level.items() <= settings.items()) for _, each in used
        ]
        return (taken, float(len(used)), *sorted((cost for cost, _ in used), reverse=True), *levels)

    def _remedy(self, settings: Settings) -> Remedy:
        config = with_settings(self._config, settings)
        machine = self._planner.machine
        host = 0.0 if machine.device.type == "cpu" else max(each.need.host for each in self._planner.phases(config))
        return Remedy(settings, host, None if self._seconds is None else self._seconds(config))

    def _is_valid(self, settings: Settings) -> bool:
        try:
            with_settings(self._config, settings)
        except UserError:
            return False
        return True

    def _fits(self, settings: Settings, *, device_alone: bool = False) -> bool:
        """True if a step fits; `device_alone`: whatever it takes of the host, which changes take more of, not less."""
        phases = self._phases(settings)
        if device_alone:
            return phases is not None and all(phase.total <= phase.machine.device_bytes for phase in phases)
        return phases is not None and all(phase.fits for phase in phases)

    @once_for(lambda self, settings: tuple(sorted(settings.items())))
    def _phases(self, settings: Settings) -> list[PhaseMemory] | None:
        """The phases of a step; none: settings violate a rule together with the others."""
        try:
            return self._planner.phases(with_settings(self._config, settings))
        except UserError:
            return None


def candidates(config: AnyStep, machine: Device) -> Iterator[Settings]:
    """Settings that may reduce the memory of a step, in order of increasing cost; each is to be applied alone."""
    changes = {change.name: change for change in _changes(config, machine)}
    for change in changes.values():
        yield from (_needed(change, changes) | level for level in change.levels)


def _needed(change: _Change, changes: Mapping[str, _Change]) -> Settings:
    """The settings that a change needs besides its own."""
    if change.need is None or change.need not in changes:
        return {}
    return changes[change.need].levels[0]


def _changes(config: AnyStep, machine: Device) -> Iterator[_Change]:
    """What may reduce the memory of a step, in order of increasing cost."""
    checkpointing = _Change("model.gradient_checkpointing", [{"model.gradient_checkpointing": True}])
    if not config.model.gradient_checkpointing:
        yield checkpointing
    if config.train.micro_batch_size is None:
        smaller = _halves("train.micro_batch_tokens", config.train.tokens_on(machine.device.type), least=512)
    else:
        smaller = _halves("train.micro_batch_size", config.train.micro_batch_size, least=1)
    yield _Change("train", smaller)
    if not config.model.activation_offload:
        need = None if config.model.gradient_checkpointing else checkpointing.name
        yield _Change("model.activation_offload", [{"model.activation_offload": True}], need)
    yield from _engine_changes(config)
    if isinstance(config, RLConfig):
        most = config.rollout.kv_cache_gib
        # without a size the cache takes what is left, which on a small device is less than a size that is set
        limit = machine.device_bytes / 2**30 / 4 if most is None else most
        sizes = [each for each in (8.0, 4.0, 2.0, 1.0, 0.5) if each < limit]
        yield _Change("rollout.kv_cache_gib", [{"rollout.kv_cache_gib": each} for each in sizes])
        for key in ("offload_frozen", "offload_states"):
            if not getattr(config.rollout, key):
                yield _Change(f"rollout.{key}", [{f"rollout.{key}": True}])
        sizes_together = group_sizes(machine, above=config.rollout.tensor_parallel)
        yield _Change("rollout.tensor_parallel", [{"rollout.tensor_parallel": each} for each in sizes_together])


def group_sizes(machine: Device, *, above: int = 1) -> list[int]:
    """Sizes of tensor-parallel groups: powers of two that divide the ranks of a host, and its ranks; then whole
    hosts."""
    local = machine.cluster.ranks_per_host
    within = [size for size in {*(2**power for power in range(12)), local} if size <= local and local % size == 0]
    across = [local * hosts for hosts in range(2, machine.ranks // local + 1) if machine.ranks // local % hosts == 0]
    return sorted(size for size in {*within, *across} if size > above and machine.ranks % size == 0)


def _engine_changes(config: AnyStep) -> Iterator[_Change]:
    """Changes of the engines that train. A critic follows the actor unless it has settings of its own."""
    sections: dict[str, tuple[ZeroConfig, LoraConfig | None]]
    if isinstance(config, RLConfig):
        sections = {"actor.": (config.actor.zero, config.actor.lora)}
        if config.critic is not None and (config.critic.zero is not None or config.critic.lora is not None):
            sections["critic."] = (config.critic_zero, config.critic_lora)
    else:
        sections = {"": (config.zero, config.lora)}

    def each(key: str, value: Any) -> Settings:
        return {section + key: value for section in sections}

    zeros = [zero for zero, _ in sections.values()]
    least = min(zero.stage for zero, _ in sections.values())
    # a stage that shards nothing makes offloading possible
    yield _Change("zero.stage", [each("zero.stage", stage) for stage in (1, 2, 3) if least < stage])
    if not all(zero.offload_optimizer for zero in zeros):
        need = None if least else "zero.stage"
        yield _Change("zero.offload_optimizer", [each("zero.offload_optimizer", True)], need)
    if not all(zero.offload_parameters for zero in zeros):
        need = None if least == 3 else "zero.stage"
        yield _Change("zero.offload_parameters", [each("zero.offload_parameters", True)], need)
    if any(lora is None for _, lora in sections.values()):
        yield _Change(_ADAPTERS, [each("lora.rank", 16)])


def _merged(options: Sequence[Settings]) -> Settings:
    return {key: value for option in options for key, value in option.items()}
