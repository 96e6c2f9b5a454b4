"""Lists of keys: all keys with their values, for programs and for completion in a shell; and which of them may change
when a run is resumed, those marked `mutable` where they are declared.

The latter decide where things are and how they run, not what is learned. `train.py` refuses to continue a folder with
any other change, and a step that resumes from a checkpoint names other changes in a warning.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rlhf.configs.parsing.schema import options_of, section_kinds, type_hints
from hybrid_rlhf.configs.sections.rules import marks_of


def choices_of(hint: Any) -> list[str] | None:
    """The values of a type, as they are written on the line; None: they are not listed."""
    found: list[str] = []
    for option in options_of(hint):
        if typing.get_origin(option) is typing.Literal:
            found += [str(value) for value in typing.get_args(option) if value != ""]
        elif option in (bool, type(None)):
            found += ["true", "false"] if option is bool else ["null"]
        else:
            return None
    return found


def every_key(config_type: type) -> dict[str, list[str]]:
    """Every dotted key of a config under every algorithm, with its choices; [] where they are not listed."""
    found: dict[str, list[str]] = {}
    waiting: list[tuple[str, type, tuple[str, ...] | None]] = [("", config_type, None)]
    while waiting:
        prefix, kind, kept = waiting.pop(0)
        for declared in dataclasses.fields(kind):
            if kept is not None and declared.name not in kept:
                continue
            hint, marks = type_hints(kind)[declared.name], marks_of(declared)
            key, kinds = f"{prefix}{declared.name}", section_kinds(declared, hint)
            if marks.variants:
                found[f"{key}.name"] = found[key] = list(marks.variants)
            if not kinds and declared.init:
                found[key] = list(dict.fromkeys([*found.get(key, []), *(choices_of(hint) or [])]))
            waiting += [(f"{key}.", inner, marks.keys) for inner in kinds]
    return found


def changed_keys(config_type: type, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The dotted keys, sorted, whose values differ between two configs of a step and that decide what is learned."""
    changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    return [key for key in changed if not is_mutable([config_type], key.split("."))]


def is_mutable(kinds: Sequence[type], names: Sequence[str]) -> bool:
    """Whether a key, split at its dots, may change in a resumed run; `kinds` are the dataclasses it may be in."""
    for kind in kinds:
        for declared in dataclasses.fields(kind):
            if declared.name != names[0]:
                continue
            inner = section_kinds(declared, type_hints(kind)[declared.name])
            if marks_of(declared).mutable or (names[1:] and is_mutable(inner, names[1:])):
                return True
    return False
