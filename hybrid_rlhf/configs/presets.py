"""Defaults that come with a choice: `algorithm: grpo` brings GRPO's, under whatever else the user says."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def preset_values(config_type: Any, said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Dotted keys and values that the choices of a config, and of its sections, bring.

    Args:
        config_type: a dataclass whose PRESETS, or whose sections' PRESETS, name the choices of a key `algorithm`.
        said: what the user gives, as dotted keys, the last word counts; a name that is no choice brings nothing and is
            refused elsewhere.
    """
    values: dict[str, Any] = {}
    for prefix, presets, default in _choices(config_type):
        named = [default, *(part[f"{prefix}algorithm"] for part in said if f"{prefix}algorithm" in part)]
        chosen = presets.get(str(named[-1]), {})
        values |= {f"{prefix}{key}": value for key, value in chosen.items()}
    return values


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


def _choices(config_type: Any, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Mapping[str, Any]], str]]:
    """Prefix, presets and default choice of every section that has one."""
    if hasattr(config_type, "PRESETS"):
        yield prefix, config_type.PRESETS, config_type.algorithm
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _choices(hints[field.name], f"{prefix}{field.name}.")
