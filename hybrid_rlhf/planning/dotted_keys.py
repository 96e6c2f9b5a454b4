"""Settings of a config by their dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybrid_rlhf.configs.sections.hints import section_type, type_hints

Settings = dict[str, Any]
"""Dotted keys of a step and their values."""


def with_settings(config: Any, settings: Settings) -> Any:
    """A config with dotted keys changed; all keys of a section at once, because its rules check them together."""
    own = {key: value for key, value in settings.items() if "." not in key}
    for section in {key.partition(".")[0] for key in settings if "." in key}:
        inner = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{section}.")}
        section_class = section_type(type_hints(config.__class__)[section])
        value = getattr(config, section)
        assert section_class is not None
        own[section] = with_settings(section_class() if value is None else value, inner)
    return replace(config, **own)


def as_options(settings: Mapping[str, Any], prefix: str) -> str:
    """Settings as the command line takes them."""
    return " ".join(f"--{prefix}{key} {str(value).lower()}" for key, value in settings.items())


def setting(config: Any, key: str) -> Any:
    """The value of a dotted key; None in a section that is not set."""
    for name in key.split("."):
        config = None if config is None else getattr(config, name)
    return config
