"""Declarations for the sections of a config: marks of a field besides its type, bounds, and rules for values.

Marks are on the field, so that a new key needs one edit. Help, saved configs, the check of a resumed run and the
documentation read them. pydantic reads and checks values; it is imported for the first section that is made, which
`--help` does not need.
"""

from __future__ import annotations

import functools
import json
import operator
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import SequenceMatcher
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from annotated_types import Interval

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.hints import is_list, options_of, parts_of, section_type, type_hints, type_name

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails, SchemaValidator

Count = Annotated[int, Interval(ge=1)]
Natural = Annotated[int, Interval(ge=0)]
RowTokens = Annotated[int, Interval(ge=2)]
Port = Annotated[int, Interval(ge=0, le=65535)]
Positive = Annotated[float, Interval(gt=0)]
NonNegative = Annotated[float, Interval(ge=0)]
Share = Annotated[float, Interval(ge=0, le=1)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
ShareBelowOne = Annotated[float, Interval(ge=0, lt=1)]
FloatType = Literal["auto", "float32", "bfloat16", "float16"]
Bounds = tuple[float, float]
"""Lower and upper bound."""
_UNKNOWN = "unexpected_keyword_argument"
"""pydantic's name of an unknown key."""
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
    """For a section with several types: the type for each value of its key `name`; the first is the default."""
    needs: str | None = None
    """For a section that exists only with some algorithms: the class attribute of the algorithm that must be true."""
    keys: tuple[str, ...] | None = None
    """For a section: the keys that this place reads; None for all."""
    read: Callable[[Any], Any] | None = None
    """For a key whose value is a dataclass: converts the user's value, whose type is that of the only argument. The
    dataclass converts back with `as_given`."""


def setting(default: Any, **marks: Any) -> Any:
    """A dataclass field with marks; the keywords are the fields of `Marks`. Each object has its own copy of a list or a
    mapping. The default of a section is its class, or a mapping of the keys in which it differs from the class."""
    metadata = {"marks": Marks(**marks)}
    if isinstance(default, list | dict | type):
        factory: Any = getattr(default, "copy", default)
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(**keys: Any) -> Any:
    """A field with a section whose keys have these defaults, and otherwise those of its class."""
    return setting(keys)


def advanced(default: Any, **options: Any) -> Any:
    """A field that only `--help-all` shows; the options are those of `setting`."""
    return setting(default, advanced=True, **options)


def marks_of(declared: Field[Any]) -> Marks:
    """The marks of a field; a plain field has the default marks."""
    marks: Marks = declared.metadata.get("marks", Marks())
    return marks


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Settings:
    """Base class of sections: makes them frozen dataclasses with keyword arguments, whose values pydantic reads.

    Bounds are constraints in the annotation of a field or of its items, such as `Interval(ge=1)`. A text beside them is
    the fix in errors, by default the field's default.

    A class may have a method `_check`, which raises UserError for values that contradict each other; those of base
    classes run first. It may have a mapping `following` from keys whose defaults follow from other values to functions
    that return these defaults, from the values of the section and its inner ones by key. It may have a mapping
    `retired` from keys of earlier versions, or that one may expect, to what does their work, which the errors of these
    keys name.
    """

    __pydantic_config__ = MappingProxyType({"extra": "forbid", "allow_inf_nan": False, "validate_default": True})

    def __init_subclass__(cls) -> None:
        for name in vars(cls).get("__annotations__", ()):
            default = vars(cls).get(name)
            if isinstance(default, list | dict):
                setattr(cls, name, setting(default))
        dataclass(frozen=True, kw_only=True, init=False)(cls)

    def __init__(self, **given: Any) -> None:
        """Read the values of fields; the others have their defaults. A single item may stand for a list.

        Raises:
            UserError: for a value of another type or outside its bounds, or a rule of the class.
        """
        from pydantic import ValidationError
        from pydantic_core import ArgsKwargs

        kind: Any = type(self)
        for name, value in given.items():
            hint = type_hints(kind).get(name, Any)
            if isinstance(value, bool) and not {bool, Any} & {*options_of(hint)}:  # pydantic takes true for 1
                raise UserError(_broken_rule(kind, name, value))
            if isinstance(value, str | Mapping) and is_list(hint):
                given[name] = [value]
        try:
            _validator(kind).validate_python(ArgsKwargs((), given), self_instance=self)
        except ValidationError as error:
            raise _explained(kind, error) from None

    def __post_init__(self) -> None:
        for kind in reversed(type(self).__mro__):
            if "_check" in vars(kind):
                try:
                    vars(kind)["_check"](self)
                except UserError as error:  # pydantic adds where the section is
                    raise ValueError(error) from None


@functools.cache
def _validator(kind: Any) -> SchemaValidator:
    """pydantic's reader of a section."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validator  # type: ignore[return-value]


def _explained(kind: Any, error: ValidationError) -> UserError:
    """The first mistake that pydantic has found in the values of a section: the rule, the value and the fix."""
    errors = error.errors(include_url=False)
    # Of the types of a union, the one that the value resembles most
    first = max((other for other in errors if other["loc"][:1] == errors[0]["loc"][:1]), key=_depth)
    place, problem = first["loc"], first["type"]
    owner = inner = kind
    name = ""
    for part in map(str, place):
        if part in type_hints(inner):
            owner, name = inner, part
            inner = next(filter(is_dataclass, parts_of(type_hints(owner)[name])), inner)
    if problem == "value_error":
        rule = str(first["ctx"]["error"])
    elif problem == _UNKNOWN:
        known = type_hints(inner)
        key = str(place[-1])
        retired = getattr(inner, "retired", {}).get(key)
        hint = retired or space_hint(key, known) or nearest_hint(key, known, otherwise=", ".join(known))
        rule = f"unknown key {key}: {hint}"
    else:
        rule = _broken_rule(owner, name, first["input"], problem)
    is_item = any(isinstance(part, int) for part in place) and not rule.startswith(f"{place[0]} ")
    return UserError(f"{place[0]}: {rule}" if is_item else rule)


def _depth(error: ErrorDetails) -> tuple[int, bool, bool]:
    """How far a value was read until an error."""
    return len(error["loc"]), error["type"] == _UNKNOWN, not error["type"].endswith("_type")


def _broken_rule(owner: Any, name: str, value: Any, problem: str = "") -> str:
    """The error of a field's value, from pydantic's name of the problem."""
    hint = type_hints(owner)[name]
    rule, fix = type_name(hint), _example(hint, default_of(owner.__dataclass_fields__[name]), value)
    if problem == "finite_number":
        rule, fix = "a finite number", "give one, or leave it out"
    if problem.startswith(("greater", "less")):
        notes = {type(note): note for note in parts_of(typing.get_type_hints(owner, include_extras=True)[name])}
        default = default_of(owner.__dataclass_fields__[name])
        change = "raise" if problem.startswith("greater") else "lower"
        usual = "leave it out" if default is None else f"{change} it, for example to {_shown(default)}"
        rule, fix = _in_words(notes[Interval]), notes.get(str, usual)
    if value is None:
        value, fix = "null", "give a value, or leave it out"
    return f"{name} must be {rule}, got {value}: {fix}"


def _example(hint: Any, default: Any, value: Any) -> str:
    """Advice on the type of a value that is not of it."""
    names = [name for part in parts_of(hint) if typing.get_origin(part) is Literal for name in get_args(part)]
    if names:
        return nearest_hint(str(value), filter(None, map(str, names)), otherwise="give one of them")
    if isinstance(default, bool | int | float | str) and default != "":
        return f"give for example {str(default).lower() if isinstance(default, bool) else default}"
    examples = {bool: "true", int: "10", float: "1e-5", str: "a text"}
    kind = next((option for option in options_of(hint) if option in examples), None)
    return "see --help" if kind is None else f"give for example {examples[kind]}"


def _in_words(bounds: Interval) -> str:
    low: Any = bounds.gt if bounds.ge is None else bounds.ge
    high: Any = bounds.lt if bounds.le is None else bounds.le
    if high is None:
        return f"above {low}" if bounds.ge is None else f"{low} or more"
    return f"in {'(' if bounds.ge is None else '['}{low}, {high}{')' if bounds.le is None else ']'}"


@functools.cache
def defaults_of(kind: type) -> SimpleNamespace:
    """The defaults of a section, by field; MISSING for a field that must be given."""
    defaults = {}
    for declared in fields(kind):
        value = default_of(declared)
        inner = section_type(type_hints(kind)[declared.name])
        defaults[declared.name] = inner(**value) if inner and value is not None else value
    return SimpleNamespace(**defaults)


def default_of(declared: Field[Any]) -> Any:
    """The default of a field, of a section a mapping; MISSING if it must be given."""
    factory = declared.default_factory
    if isinstance(factory, type):
        return {}
    return declared.default if factory is MISSING else factory()


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
    kind: Any = type(config)
    defaults = defaults_of(kind)
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


def space_hint(key: str, known: Iterable[str]) -> str:
    """The end of an error for {key:value}, which is one name in YAML; empty for any other."""
    name, colon, _ = key.partition(":")
    return f"write a space after {name}:" if colon and name in known else ""


def nearest_hint(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """The end of an error: the nearest name, or else `otherwise`."""
    nearest_name = nearest(name, known)
    return otherwise if nearest_name is None else f"the nearest is {nearest_name}"
