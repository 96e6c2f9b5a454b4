"""Which settings may change when a run is resumed: those marked `mutable` where they are declared.

They decide where things are and how they run, not what is learned. `train.py` refuses to continue a folder with any
other change, and a step that resumes from a checkpoint names other changes in a warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rlhf.configs.parsing.schema import section_kinds, type_hints
from hybrid_rlhf.configs.sections.rules import marks_of


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
