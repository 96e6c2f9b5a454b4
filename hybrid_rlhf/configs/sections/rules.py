"""What the sections of a config are written with: what a field says about itself beside its type, and the rules that
values are checked by.

Why on the field: adding a key is one edit. Help, saved configs, the check of a resumed run and the documentation read
these marks.
"""

from __future__ import annotations

import functools
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import SequenceMatcher
from typing import Annotated, Any

from hybrid_rlhf.configs.errors import UserError

Count = Annotated[int, "1 or more"]
Natural = Annotated[int, "0 or more"]
RowTokens = Annotated[int, "2 tokens or more"]
Port = Annotated[int, "in 0..65535: choose another"]
Positive = Annotated[float, "above 0"]
NonNegative = Annotated[float, "0 or more"]
Nats = Annotated[float, "above 0 nats"]
Share = Annotated[float, "in [0, 1]"]
Discount = Annotated[float, "in [0, 1]: give for example 0.95"]
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
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


class Settings:
    """Base of sections whose fields carry bounds: a text beside the type, such as "above 0", "2 tokens or more" or
    "in [0, 1)", that is the rule in errors too. What follows a colon is the fix, by default the field's default."""

    def __post_init__(self) -> None:
        for name, (bound, default) in _bounds(type(self)).items():  # type: ignore[arg-type]  # a type is hashable
            value = getattr(self, name)
            rule, _, fix = bound.partition(": ")
            if isinstance(value, int | float) and (side := _outside(value, rule)):
                usual = "leave it out" if default is None else f"{side} it, for example to {default}"
                raise UserError(f"{name} must be {rule}, got {value}: {fix or usual}")
        self._check()

    def _check(self) -> None:
        """Raise UserError for values that do not go together."""


@functools.cache
def _bounds(kind: Any) -> dict[str, tuple[str, Any]]:
    """The bound and default of each field that has a bound."""
    hints = typing.get_type_hints(kind, include_extras=True)
    bounds = {}
    for declared in fields(kind):
        for option in (hints[declared.name], *typing.get_args(hints[declared.name])):
            if typing.get_origin(option) is Annotated:
                bounds[declared.name] = (option.__metadata__[0], declared.default)
    return bounds


def _outside(value: float, rule: str) -> str:
    """What to do with a value that breaks a rule: raise or lower; empty where it holds."""
    least, *most = map(float, _NUMBER.findall(rule))
    if value < least or (value == least and rule.startswith(("above", "in ("))):
        return "raise"
    return "lower" if most and (value > most[0] or (value == most[0] and rule.endswith(")"))) else ""


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
