"""What the sections of a config are written with: what a field says about itself beside its type, and the rules that
values are checked by.

Why on the field: adding a key is one edit. Help, saved configs, the check of a resumed run and the documentation read
these marks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field
from difflib import SequenceMatcher
from typing import Any

from hybrid_rlhf.configs.errors import UserError

_SIMILAR = 0.6
"""Least share of equal letters of a name that is suggested."""


@dataclass(frozen=True)
class Marks:
    """Marks of one field."""

    advanced: bool = False
    """Shown by `--help-all` only."""
    mutable: bool = False
    """May change when a run is resumed; of a section: all its keys."""
    variants: Mapping[str, type] | None = None
    """Of a section with several types: the type for each value of its key `name`."""
    needs: str | None = None
    """Of a section that exists only if the config's algorithm has this class attribute true."""
    keys: tuple[str, ...] | None = None
    """Of a section: the keys that this place reads; none: all."""
    read: Callable[[Any], Any] | None = None
    """Of a key whose value is a dataclass: reads it from what the user gives, the type of its one argument. The
    dataclass gives that form back with `as_given`."""


def setting(default: Any = MISSING, *, default_factory: Callable[[], Any] | None = None, **marks: Any) -> Any:
    """A dataclass field with marks, the fields of `Marks`."""
    metadata = {"marks": Marks(**marks)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def marks_of(declared: Field[Any]) -> Marks:
    """The marks of a field; those of a plain field are the defaults."""
    marks: Marks = declared.metadata.get("marks", Marks())
    return marks


def require(condition: bool, message: str) -> None:
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)


def is_plain(values: Mapping[str, Any]) -> bool:
    """Whether JSON, and so the run's config.yaml, can hold values."""
    try:
        return bool(json.loads(json.dumps(values, allow_nan=False)) == values)
    except (TypeError, ValueError):  # a date, a number that is not finite
        return False


def require_template_variables(values: Mapping[str, Any]) -> None:
    """Raise UserError unless values can be variables of a chat template."""
    require(
        is_plain(values) and all(name.isidentifier() for name in values),
        f"chat_template_kwargs are names with texts, numbers, lists and mappings, got {values}: give for example "
        "{enable_thinking: false}",
    )


def whole_number(value: Any) -> int:
    """A number of 0 or more from a file or the command line; anything else counts as 0, and is refused elsewhere."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar; none: no name is similar enough to be meant.

    Names that begin with the given one or contain it are similar; of two that are equally similar, the one of the same
    letters is nearer.
    """

    def similarity(candidate: str) -> float:
        ratio = SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        return ratio + 0.2 * (sorted(name) == sorted(candidate)) + _SIMILAR * (len(name) > 1 and name in candidate)

    best = max(known, key=similarity, default=None)
    return best if best is not None and similarity(best) >= _SIMILAR else None


def nearest_hint(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """The end of an error: the nearest name, or what else to do."""
    found = nearest(name, known)
    return otherwise if found is None else f"the nearest is {found}"
