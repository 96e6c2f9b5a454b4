"""Lists of keys: all keys with their values, for programs and for completion in a shell; and the keys that may change
when a run is resumed, which are marked `mutable` in their declaration.

Mutable keys affect where things are and how they run, but not the results of training. `train.py` refuses to continue a
folder after any other change, and a step that resumes from a checkpoint warns of other changes.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from hybrid_rlhf.configs.parsing.schema import fields_on_path, typed_fields
from hybrid_rlhf.configs.sections.hints import options_of
from hybrid_rlhf.configs.sections.rules import marks_of


def choices_of(hint: Any) -> list[str] | None:
    """The values of a type as written on the command line; None if they are not listed."""
    choices: list[str] = []
    for option in options_of(hint):
        if typing.get_origin(option) is typing.Literal:
            choices += [str(value) for value in typing.get_args(option) if value != ""]
        elif option in (bool, type(None)):
            choices += ["true", "false"] if option is bool else ["null"]
        else:
            return None
    return choices


def every_key(config_type: type) -> dict[str, list[str]]:
    """Every dotted key of a config under every algorithm, with its choices; [] if they are not listed."""
    choices: dict[str, list[str]] = {}
    waiting: list[tuple[str, type, tuple[str, ...] | None]] = [("", config_type, None)]
    for prefix, kind, read_keys in waiting:  # which grows
        for declared, hint, kinds in typed_fields(kind):
            if read_keys is not None and declared.name not in read_keys:
                continue
            marks = marks_of(declared)
            key = f"{prefix}{declared.name}"
            if marks.variants:
                choices[f"{key}.name"] = choices[key] = list(marks.variants)
            if not kinds:
                choices[key] = list(dict.fromkeys([*choices.get(key, []), *(choices_of(hint) or [])]))
            waiting += [(f"{key}.", inner, marks.keys) for inner in kinds]
    return choices


def changed_keys(config_type: type, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The dotted keys, sorted, that differ between two configs of a step and affect the results of training."""
    changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    return [key for key in changed if not is_mutable(config_type, key)]


def is_mutable(config_type: type, key: str) -> bool:
    """Return True if a dotted key may change in a resumed run."""
    return any(marks_of(field).mutable for named in fields_on_path(config_type, key) for field, _, _ in named)
