"""Keys that a config does not read in its case: refused where the user gives them, left out where a config is saved.

Which keys these are stands in KEY_RULES of a config (configs/algorithms.py). A key that is given counts whatever its
value, the default too: who gives it expects an effect. A saved config leaves such keys out, so that it reads back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from hybrid_rlhf.configs.algorithms import KeyRule
from hybrid_rlhf.configs.errors import UserError


def refuse_unread(config: Any, given: Iterable[str]) -> None:
    """Hold the dotted keys that a user gives against what a config reads.

    Raises:
        UserError: for the first key that is not read.
    """
    unread = list(_unread(config))
    for key in given:
        for prefix, section, name, rule in unread:
            if _matches(key, prefix + name):
                value = _value(config, key)
                algorithm = getattr(section, "algorithm", None)
                raise UserError(rule.otherwise.format(key=key.removeprefix(prefix), value=value, algorithm=algorithm))


def without_unread(config: Any, content: dict[str, Any]) -> dict[str, Any]:
    """Nested keys and values of a config, in place, less what it does not read.

    Args:
        config: whose rules hold.
        content: sections as dictionaries; a section that is not read goes as a whole.
    """
    for prefix, _, name, _ in _unread(config):
        *sections, last = f"{prefix}{name}".rstrip(".").split(".")
        place = content
        for section in sections:
            place = place.get(section, {})
        place.pop(last, None)
    return content


def _unread(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, KeyRule]]:
    """Prefix of a section, the section, a key in it, and the rule by which it is not read."""
    for rule in getattr(config, "KEY_RULES", ()):
        if not rule.read(config):
            yield from ((prefix, config, name, rule) for name in rule.keys)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _unread(value, f"{prefix}{field.name}.")


def _matches(key: str, name: str) -> bool:
    return key == name or key.startswith(name if name.endswith(".") else f"{name}.")


def _value(config: Any, key: str) -> Any:
    value = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value
