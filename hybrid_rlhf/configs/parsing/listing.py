"""Lists of keys and of their values, for programs and for completion in a shell."""

from __future__ import annotations

import dataclasses
import typing
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
