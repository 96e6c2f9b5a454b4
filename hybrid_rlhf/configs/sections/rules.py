"""Declarations for the sections of a config: marks of a field besides its type, and rules for values.

Marks are on the field, so that a new key needs one edit. Help, saved configs, the check of a resumed run and the
documentation read them.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from difflib import SequenceMatcher
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, Literal

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
PositiveShare = Annotated[float, "in (0, 1]"]
ShareBelowOne = Annotated[float, "in [0, 1)"]
Seed = Annotated[int, "0 or more: give for example 42"]
FloatType = Literal["auto", "float32", "bfloat16", "float16"]
Bounds = tuple[float, float]
"""Lower and upper bound."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_SIMILAR = 0.6
"""Smallest similarity of a name that is suggested."""


@dataclass(frozen=True)
class Marks:
    """Marks of one field."""

    advanced: bool = False
    """True if only `--help-all` shows the key."""
    mutable: bool = False
    """True if the key, or all keys of the section, may change when a run is resumed."""
    variants: Mapping[str, type] | None = None
    """For a section with several types: the type for each value of its key `name`."""
    needs: str | None = None
    """For a section that exists only with some algorithms: the class attribute of the algorithm that must be true."""
    keys: tuple[str, ...] | None = None
    """For a section: the keys that this place reads; None for all."""
    read: Callable[[Any], Any] | None = None
    """For a key whose value is a dataclass: converts the user's value, whose type is that of the only argument. The
    dataclass converts back with `as_given`."""


def setting(default: Any, **marks: Any) -> Any:
    """A dataclass field with marks; the keywords are the fields of `Marks`. Each object has its own copy of a list or a
    mapping."""
    metadata = {"marks": Marks(**marks)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def advanced(default: Any, **options: Any) -> Any:
    """A field that only `--help-all` shows; the options are those of `setting`."""
    return setting(default, advanced=True, **options)


def marks_of(declared: Field[Any]) -> Marks:
    """The marks of a field; a plain field has the default marks."""
    marks: Marks = declared.metadata.get("marks", Marks())
    return marks


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Settings:
    """Base class of sections: makes them frozen dataclasses with keyword arguments, and checks bounds.

    A bound is a text in the annotation of a field or of its items, such as "above 0", "2 tokens or more" or "in [0,
    1)", which errors quote as the rule. Text after a colon is the fix, by default the field's default. The bound of a
    text is the error if it is empty.

    A class may have a method `_check`, which raises UserError for values that contradict each other; those of base
    classes run first. It may have a mapping `following` from keys whose defaults follow from other values to functions
    that return these defaults, from the values of the section and its inner ones by key. The class of a command may
    have a mapping `retired` from keys of earlier versions to what does their work now, which the errors of these keys
    name.
    """

    def __init_subclass__(cls) -> None:
        for name in vars(cls).get("__annotations__", ()):
            default = vars(cls).get(name)
            if isinstance(default, list | dict):
                setattr(cls, name, setting(default))
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for name, (bound, default) in _bounds(type(self)).items():  # type: ignore[arg-type]  # a type is hashable
            value = getattr(self, name)
            require(value != "", bound)
            rule, _, fix = bound.partition(": ")
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, int | float) and (side := _outside(item, rule)):
                    usual = "leave it out" if default is None else f"{side} it, for example to {_shown(default)}"
                    raise UserError(f"{name} must be {rule}, got {_shown(value)}: {fix or usual}")
        for kind in reversed(type(self).__mro__):
            if "_check" in vars(kind):
                vars(kind)["_check"](self)


def defaults_of(kind: type) -> SimpleNamespace:
    """The defaults of a section, by field; MISSING for a field that must be given."""
    return SimpleNamespace(
        **{
            declared.name: declared.default_factory() if callable(declared.default_factory) else declared.default
            for declared in fields(kind)
        }
    )


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
    """How to change a value that breaks a rule: "raise" or "lower"; empty if it is valid."""
    least, *most = map(float, _NUMBER.findall(rule))
    if not value >= least or (value == least and rule.startswith(("above", "in ("))):  # NaN is outside too
        return "raise"
    return "lower" if most and (value > most[0] or (value == most[0] and rule.endswith(")"))) else ""


def require(condition: object, message: str) -> None:
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)


def require_defaults(
    config: Any,
    keys: Iterable[str],
    rule: str,
    *,
    prefix: str = "",
    others: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise UserError unless keys of a config have their defaults.

    Args:
        config: a config or a section.
        keys: dotted keys.
        rule: the beginning of the message.
        prefix: dotted name of the section, in messages.
        others: further keys, each with a value that is allowed besides its default.
    """
    defaults = defaults_of(type(config))
    for key in (*keys, *others):
        value_of = operator.attrgetter(key)
        value = value_of(config)
        default = value_of(defaults)
        name = f"{prefix}{key}"
        shown = f"the section {name}" if is_dataclass(value) else f"{name} {_shown(value)}"
        require(value in (default, others.get(key, default)), f"{rule}, got {shown}: leave it out")


def _shown(value: Any) -> Any:
    """A value as it is written in files."""
    return list(value) if isinstance(value, tuple) else value


def is_plain(values: Mapping[str, Any]) -> bool:
    """Return True if JSON, and so the run's config.yaml, can represent values."""
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
    """A natural number from a file or the command line; any other value becomes 0, and is refused elsewhere."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The most similar known name; None if no name is similar enough.

    Names that contain `name` are similar; among equally similar names, one with the same letters is nearer.
    """

    def similarity(candidate: str) -> float:
        ratio = SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        return ratio + 0.2 * (sorted(name) == sorted(candidate)) + _SIMILAR * (len(name) > 1 and name in candidate)

    best = max(known, key=similarity, default=None)
    return best if best is not None and similarity(best) >= _SIMILAR else None


def nearest_hint(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """The end of an error: the nearest name, or else `otherwise`."""
    nearest_name = nearest(name, known)
    return otherwise if nearest_name is None else f"the nearest is {nearest_name}"
