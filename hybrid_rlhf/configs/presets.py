"""Defaults that come with a choice: `algorithm: grpo` brings GRPO's, `lora.rank: 16` a learning rate of adapters.

What comes with the name of an algorithm lies over a file of defaults (the demo's) and under what the user says. What
follows from other keys lies under both. Either way the resolved config shows the number, and so does --help behind the
choice.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

LORA_RATE_FACTOR = 10
"""Default learning rates of adapters, relative to those of all weights: TRL, docs/source/lora_without_regret.md, which
takes 1e-5 for 1e-6."""


def preset_values(
    config_type: Any, said: Sequence[Mapping[str, Any]], *, under: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Dotted keys and values that the choices of a config, and of its sections, bring.

    Args:
        config_type: a dataclass. Its PRESETS, or its sections', name the choices of a key `algorithm`; its `following`
            gives the defaults that follow from other values, but for keys that are settled.
        said: what the user gives, as dotted keys, the last word counts; a name that is no choice brings nothing and is
            refused elsewhere.
        under: what a file of defaults gives, as dotted keys.
    """
    below, chosen = dict(under or {}), dict[str, Any]()
    for prefix, section, default in _sections(config_type):
        named = [default, *(part[f"{prefix}algorithm"] for part in (below, *said) if f"{prefix}algorithm" in part)]
        brought = getattr(section, "PRESETS", {}).get(str(named[-1]), {})
        chosen |= {f"{prefix}{key}": value for key, value in brought.items()}
    given = {key: value for part in said for key, value in part.items()}
    settled = {*given, *below} - ({*chosen} - {*given})
    values = flat_defaults(config_type) | below | chosen | given
    for prefix, section, _ in _sections(config_type):
        if hasattr(section, "following"):
            inside = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            fixed = {key.removeprefix(prefix) for key in settled if key.startswith(prefix)}
            chosen |= {f"{prefix}{key}": value for key, value in section.following(inside, fixed).items()}
    return chosen | {key: rate for key, rate in _lora_rates(values, chosen, config_type).items() if key not in settled}


def lora_rates(config: Any) -> dict[str, tuple[float, float]]:
    """Keys of learning rates that are the default of adapters, with that rate and the one of all weights."""
    config_type, values = type(config), flat(dataclasses.asdict(config))
    chosen = getattr(config_type, "PRESETS", {}).get(values.get("algorithm"), {})
    rates = _lora_rates(values, chosen, config_type)
    full = flat_defaults(config_type) | chosen
    return {key: (rate, full[key]) for key, rate in rates.items() if values[key] == rate}


def _lora_rates(values: Mapping[str, Any], chosen: Mapping[str, Any], config_type: Any) -> dict[str, float]:
    """The default rate of each role with adapters."""
    full = {**flat_defaults(config_type), **chosen}
    ranks = [(key, whole_number(value)) for key, value in values.items() if key.endswith("lora.rank")]
    names = [key.removesuffix("lora.rank") + "optimizer.lr" for key, rank in ranks if rank]
    return {name: float(Decimal(str(full[name])) * LORA_RATE_FACTOR) for name in names if name in full}


def whole_number(value: Any) -> int:
    """A number of 0 or more that a file or the line gives; what is none counts as 0, and is refused elsewhere."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def flat_defaults(config_type: Any) -> dict[str, Any]:
    """A config's own defaults as dotted keys."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):
        value: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value is not dataclasses.MISSING:
            is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
            defaults[field.name] = dataclasses.asdict(value) if is_section else value
    return flat(defaults)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections."""
    content: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return content


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections as dotted keys."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _sections(config_type: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Prefix, type and default algorithm of a config and of its sections."""
    yield prefix, config_type, getattr(config_type, "algorithm", "")
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _sections(hints[field.name], f"{prefix}{field.name}.")
