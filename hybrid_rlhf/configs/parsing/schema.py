"""The keys that a config has for given settings: the algorithm's name selects the dataclass of its section, and an
optional section exists once a file or the command line gives one of its keys.

`resolve` turns layers of nested settings, of which later ones override earlier ones, into a tree of sections; each
mistake in a key is an error here, before any value is read.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.trl_names import trl_answer
from hybrid_rlhf.configs.sections.rules import marks_of, nearest, nearest_hint


@dataclass(frozen=True)
class Layer:
    """Settings from one source."""

    content: Mapping[str, Any]
    """Nested settings; a section is a mapping, null, or the name of an algorithm."""
    origin: str | None = None
    """File of the settings; None for the command line or a caller."""
    strict: bool = True
    """True if unknown keys are errors; unknown keys in a file of defaults are dropped."""


@dataclass(frozen=True)
class Key:
    """One key of a config."""

    name: str
    """Dotted name."""
    hint: Any
    default: Any
    owner: type
    """Dataclass that declares the field."""
    advanced: bool
    read: Callable[[Any], Any] | None = None
    """Converts the user's value; None: pydantic converts it."""


@dataclass
class Section:
    """A dataclass of a config, with the values that are set for it."""

    name: str
    """Dotted name; empty for the config itself."""
    kind: type
    advanced: bool = False
    is_on: bool = True
    keys: dict[str, Key] = field(default_factory=dict)
    sections: dict[str, Section] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    """Values by field name, from all layers."""
    strictly_given: set[str] = field(default_factory=set)
    """Fields that a strict layer sets."""
    variants: tuple[str, ...] = ()
    """Names of the dataclasses among which this section selects."""

    @property
    def prefix(self) -> str:
        """Prefix of the dotted names of its keys."""
        return f"{self.name}." if self.name else ""

    def walk(self, *, off: bool = False) -> Iterator[Section]:
        """Iterate over this section and its inner ones; with `off` also over unused ones."""
        yield self
        for section in self.sections.values():
            if section.is_on or off:
                yield from section.walk(off=off)

    def all_keys(self, *, off: bool = False) -> dict[str, Key]:
        """Every key by its dotted name."""
        return {key.name: key for section in self.walk(off=off) for key in section.keys.values()}

    def values(self) -> dict[str, Any]:
        """The values that are set, by dotted key."""
        return {section.keys[name].name: value for section in self.walk() for name, value in section.given.items()}

    def user_keys(self) -> set[str]:
        """Dotted keys that the user sets."""
        return {section.keys[name].name for section in self.walk() for name in section.strictly_given}


def resolve(config_type: type, layers: Sequence[Layer]) -> Section:
    """The sections and keys of a config, with the values of the layers.

    Raises:
        UserError: for a key that the config does not have with these settings, with the nearest one, a section that is
            not a mapping, or null for a key that may not be null.
    """
    try:
        return _section(config_type, layers, name="", default=None)
    except UnknownKey as error:
        raise unknown_key(error, config_type, layers) from None


@functools.cache
def type_hints(kind: type | Callable[..., Any]) -> dict[str, Any]:
    """The types of a dataclass's fields, or of a function's arguments."""
    return typing.get_type_hints(kind)


def options_of(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; any other type alone."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def section_type(hint: Any) -> type | None:
    """The dataclass of a section's type, which may be optional; None for the type of a key."""
    return next((option for option in options_of(hint) if dataclasses.is_dataclass(option)), None)  # type: ignore[return-value]


def typed_fields(kind: type) -> Iterator[tuple[dataclasses.Field[Any], Any, list[type]]]:
    """The fields of a dataclass, each with its type, and the dataclasses that it may have as a section; [] for a
    key."""
    for declared in dataclasses.fields(kind):
        hint = type_hints(kind)[declared.name]
        marks = marks_of(declared)
        section = section_type(hint)
        if marks.variants:
            yield declared, hint, [*marks.variants.values()]
        else:
            yield declared, hint, [] if section is None or marks.read else [section]


def find_hints(config_type: type, name: str) -> list[Any]:
    """The types of a dotted key under every algorithm; a dataclass for a section; [] for an unknown key."""
    kinds: list[type] = [config_type]
    hints: list[Any] = []
    for part in name.split("."):
        named = [(hint, inner) for kind in kinds for field, hint, inner in typed_fields(kind) if field.name == part]
        kinds = [kind for _, inner in named for kind in inner]
        hints = [*kinds] or [hint for hint, _ in named]
    return hints


def _section(kind: type, layers: Sequence[Layer], *, name: str, default: Any) -> Section:
    section = Section(name, kind)
    default = _default_instance(kind) if default is None else default
    variant = getattr(kind, "name", None)
    for declared, hint, kinds in typed_fields(kind):
        marks = marks_of(declared)
        key = section.prefix + declared.name
        inside = [(layer, layer.content[declared.name]) for layer in layers if declared.name in layer.content]
        if not declared.init:
            for layer, value in inside:
                if layer.strict and value != variant:
                    raise UserError(f"{_place(layer)}{key} must be {variant}, got {value}: leave it out")
        elif kinds:
            _add_section(section, declared, hint, inside, key, default=getattr(default, declared.name, None))
        else:
            if marks.read:
                hint = type_hints(marks.read)["given"]
            default_value = getattr(default, declared.name)
            section.keys[declared.name] = Key(key, hint, default_value, kind, marks.advanced, marks.read)
            for layer, value in inside:
                _check_value(layer, key, value, hint)
                section.given[declared.name] = [value] if is_list(hint) and _is_one(value) else value
                if layer.strict:
                    section.strictly_given.add(declared.name)
    for layer in layers:
        for unknown in layer.content:
            if layer.strict and unknown not in {declared.name for declared in dataclasses.fields(kind)}:
                raise UnknownKey(f"{section.prefix}{unknown}", layer)
    return section


class UnknownKey(Exception):
    """An unknown key; the caller adds the known keys to the message."""

    def __init__(self, name: str, layer: Layer) -> None:
        super().__init__(name)
        self.name = name
        self.layer = layer


def _add_section(
    parent: Section,
    declared: dataclasses.Field[Any],
    hint: Any,
    inside: list[tuple[Layer, Any]],
    key: str,
    *,
    default: Any,
) -> None:
    """Resolve the section of a field and add it to its parent."""
    marks = marks_of(declared)
    field_name = declared.name
    kind = section_type(hint)
    algorithm = parent.sections.get("algorithm")
    if marks.needs is not None and not getattr(getattr(algorithm, "kind", None), marks.needs, False):
        _refuse_absent(inside, key, marks.needs, algorithm)
        return
    if marks.variants is not None:
        kind, inside = _variant(marks.variants, inside, key, default)
        default = default if type(default) is kind else None
    assert kind is not None
    optional = type(None) in options_of(hint) and marks.needs is None
    is_on = not optional or default is not None
    layers = list[Layer]()
    for layer, value in inside:
        if value is None and (optional or marks.needs is not None):
            is_on = not optional
            layers = []
        elif value is True and optional:
            is_on = True
        elif isinstance(value, Mapping):
            is_on = True
            layers = [*layers, Layer(value, layer.origin, layer.strict)]
        else:
            raise UserError(
                f"{_place(layer)}{key} must be a mapping of keys, got {value}: write its keys under it, or leave it out"
            )
    section = _section(kind, layers, name=key, default=default)
    section.is_on = is_on
    section.advanced = marks.advanced
    section.variants = tuple(marks.variants or ())
    if marks.keys is not None:
        for name in [name for name in section.keys if name not in marks.keys]:
            if name in section.strictly_given:
                raise UserError(
                    f"{key} reads {', '.join(marks.keys)} only, got {name} {section.given[name]}: leave it out"
                )
            section.keys.pop(name)
            section.given.pop(name, None)
    parent.sections[field_name] = section


def _variant(
    variants: Mapping[str, type], inside: list[tuple[Layer, Any]], key: str, default: Any
) -> tuple[type, list[tuple[Layer, Any]]]:
    """The dataclass that the name in a section selects, and the section's layers as mappings.

    A file of defaults sets keys of its own algorithm only.
    """
    normal = [(layer, {"name": value} if isinstance(value, str) else value) for layer, value in inside]
    names = [(layer, value["name"]) for layer, value in normal if isinstance(value, Mapping) and "name" in value]
    chosen = str(names[-1][1]) if names else str(default.name)
    if chosen not in variants:
        raise UserError(
            f"{_place(names[-1][0])}{key} must be one of {', '.join(variants)}, got {chosen}: "
            f"{nearest_hint(chosen, variants, otherwise='give one of them')}"
        )
    kind = variants[chosen]
    selected = []
    for layer, value in normal:
        if isinstance(value, Mapping):
            if not layer.strict and str(value.get("name", default.name)) != chosen:
                continue
            value = {name: inner for name, inner in value.items() if name != "name"}
            for name, inner in value.items():
                if layer.strict and name not in type_hints(kind):
                    _refuse_foreign(variants, layer, f"{key}.{name}", inner, chosen)
        selected.append((layer, value))
    return kind, selected


def is_list(hint: Any) -> bool:
    """Return True if a key's value is a list of any length."""
    options = options_of(hint)
    lists = (typing.get_origin(option) is list or typing.get_args(option)[1:] == (...,) for option in options)
    return str not in options and any(lists)


def _is_one(value: Any) -> bool:
    """Return True if a value is written for a list of one item."""
    return isinstance(value, Mapping) or (isinstance(value, str) and not value.lstrip().startswith("["))


def _refuse_foreign(variants: Mapping[str, type], layer: Layer, key: str, value: Any, chosen: str) -> None:
    name = key.rpartition(".")[2]
    owners = [variant for variant, kind in variants.items() if name in type_hints(kind)]
    if owners:
        named = ", ".join(owners[:3]) + " and others" * (len(owners) > 3)
        raise UserError(
            f"{_place(layer)}algorithm {chosen} has no key {key} ({named} {'has' if len(owners) == 1 else 'have'}), "
            f"got {value}: leave it out"
        )


def _refuse_absent(inside: list[tuple[Layer, Any]], key: str, needs: str, algorithm: Section | None) -> None:
    for layer, value in inside:
        if layer.strict and value is not None:
            while isinstance(value, Mapping) and value:
                name, value = next(iter(value.items()))
                key = f"{key}.{name}"
            raise UserError(
                f"{_place(layer)}algorithm {getattr(algorithm and algorithm.kind, 'name', '')} has no "
                f"{needs.removeprefix('needs_')}, got {key} {value}: leave it out"
            )


def _check_value(layer: Layer, key: str, value: Any, hint: Any) -> None:
    """Refuse null for a key that may not be null, and unknown keys in the items of a list."""
    if layer.origin is not None or not isinstance(value, str):
        check_null(value, f"{_place(layer)}{key}", hint)
    for item in value if isinstance(value, list) else ():
        inner = [
            kind for option in options_of(hint) for argument in typing.get_args(option) for kind in options_of(argument)
        ]
        _check_item(item, layer, f"an item of {key}", [kind for kind in inner if dataclasses.is_dataclass(kind)])


def _check_item(item: Any, layer: Layer, where: str, kinds: Sequence[Any]) -> None:
    if not kinds or not isinstance(item, Mapping):
        return
    hints = {name: hint for kind in kinds for name, hint in type_hints(kind).items()}  # type: ignore[arg-type]
    for name, value in item.items():
        if name not in hints:
            raise UserError(
                f"{_place(layer)}unknown key {name} in {where}: "
                f"{nearest_hint(str(name), hints, otherwise='its keys are ' + ', '.join(hints))}"
            )
        check_null(value, f"{_place(layer)}{name} in {where}", hints[name])
        section = section_type(hints[name])
        _check_item(value, layer, f"{name} of {where}", [] if section is None else [section])
    for declared in (declared for kind in kinds for declared in dataclasses.fields(kind)):
        required = declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING
        if required and declared.name not in item:
            raise UserError(f"{_place(layer)}{where} needs {declared.name}, got {item}: add it")


def check_null(value: Any, key: str, hint: Any) -> None:
    """Raise UserError for null if the type does not allow it."""
    if value is None and type(None) not in options_of(hint):
        raise UserError(f"{key} must be {type_name(hint)}, got null: give a value, or leave it out")


def unknown_key(error: UnknownKey, config_type: type, layers: Sequence[Layer]) -> UserError:
    """The error of an unknown key, with the nearest one."""
    known = _known_keys(config_type, layers)
    if not known:
        return UserError(f"{_place(error.layer)}unknown option --{error.name}: this command has none")
    hint = _hint(error.name, known)
    if error.layer.origin is None:
        return UserError(f"unknown option --{error.name}: {hint}")
    return UserError(f"{_place(error.layer)}unknown key {error.name}: {hint}")


def _known_keys(config_type: type, layers: Sequence[Layer]) -> list[str]:
    """Every key of a config under the algorithms that the layers name."""
    tree = resolve(config_type, [replace(layer, strict=False) for layer in layers])
    sections = [section.name for section in tree.walk(off=True) if section.name]
    names = [f"{section.name}.name" for section in tree.walk(off=True) if section.variants]
    return [*tree.all_keys(off=True), *sections, *names]


def _hint(wrong: str, known: Sequence[str]) -> str:
    """Advice for an unknown key: a key with the same last name, the equivalent of TRL's name, or a similar key.

    A key in an existing section is compared with the keys of that section, without the section's name.
    """
    section, _, leaf = wrong.rpartition(".")
    inside = [name for name in known if name.endswith(f".{wrong}")]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if exact := inside or same_leaf:
        return f"the nearest is {max(exact, key=lambda name: SequenceMatcher(None, wrong, name).ratio())}"
    if (answer := trl_answer(wrong, known)) is not None:
        return answer
    siblings = {name.rpartition(".")[2]: name for name in known if section and name.rpartition(".")[0] == section}
    nearest_name = siblings.get(nearest(leaf, siblings) or "") or nearest(wrong, known)
    return "--help lists the keys" if nearest_name is None else f"the nearest is {nearest_name}"


def _default_instance(kind: type) -> Any:
    """An object with the defaults of a section; fields without a default are missing."""
    values = {}
    for declared in dataclasses.fields(kind):
        if declared.default is not dataclasses.MISSING:
            values[declared.name] = declared.default
        elif declared.default_factory is not dataclasses.MISSING:
            values[declared.name] = declared.default_factory()
    return types.SimpleNamespace(**values)


def _place(layer: Layer) -> str:
    return "" if layer.origin is None else f"{layer.origin}: "


def type_name(hint: Any) -> str:
    """A type as shown in help and errors."""
    parts = typing.get_args(hint)
    if hint in (type(None), ...):
        return "..." if hint is ... else "null"
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(str(part) for part in parts if part != '')}"
    options = options_of(hint)
    if len(options) > 1:
        return " or ".join(map(type_name, options))
    return f"{hint.__name__}[{', '.join(map(type_name, parts))}]" if parts else str(hint.__name__)
