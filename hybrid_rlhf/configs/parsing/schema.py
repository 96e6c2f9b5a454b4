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
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.trl_names import trl_answer
from hybrid_rlhf.configs.sections.rules import Marks, defaults_of, marks_of, nearest, nearest_hint


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
    given: tuple[Layer, Any] | None = None
    """The last layer that sets the key, and its value."""


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
    unknown: list[tuple[Layer, str]] = field(default_factory=list)
    """Dotted keys that a strict layer sets, and the section does not have."""
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

    def defaults(self) -> dict[str, Any]:
        """The defaults of the keys in use, by dotted key."""
        return {name: key.default for name, key in self.all_keys().items()}

    def values(self) -> dict[str, Any]:
        """The values that are set, by dotted key."""
        return {name: key.given[1] for name, key in self.all_keys().items() if key.given}

    def user_keys(self) -> set[str]:
        """Dotted keys that the user sets."""
        return {name for name, key in self.all_keys().items() if key.given and key.given[0].strict}


def resolve(config_type: type, layers: Sequence[Layer]) -> Section:
    """The sections and keys of a config, with the values of the layers.

    Raises:
        UserError: for a key that the config does not have with these settings, with the nearest one, a section that is
            not a mapping, or null for a key that may not be null.
    """
    tree = Section("", config_type)
    _fill(tree, layers, defaults_of(config_type))
    for section in tree.walk(off=True):
        for layer, name in section.unknown:
            raise unknown_key(name, layer, tree)
    return tree


TypedField = tuple[dataclasses.Field[Any], Any, list[type]]
"""A field, its type, and the dataclasses that it may have as a section; [] for a key."""
_Given = list[tuple[Layer, Any]]
"""The values of a key or a section in the layers that set it."""


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


def typed_fields(kind: type) -> Iterator[TypedField]:
    """The fields of a dataclass, each with its type, and the dataclasses that it may have as a section; [] for a
    key."""
    for declared in dataclasses.fields(kind):
        marks = marks_of(declared)
        hint = type_hints(marks.read)["given"] if marks.read else type_hints(kind)[declared.name]
        section = section_type(hint)
        yield declared, hint, [*(marks.variants or {}).values()] or ([] if section is None else [section])


def fields_on_path(config_type: type, name: str) -> Iterator[list[TypedField]]:
    """For each part of a dotted key, the fields that it may be under every algorithm; [] if there is none."""
    kinds = [config_type]
    for part in name.split("."):
        named = [entry for kind in kinds for entry in typed_fields(kind) if entry[0].name == part]
        yield named
        kinds = [kind for _, _, inner in named for kind in inner]


def find_hints(config_type: type, name: str) -> list[Any]:
    """The types of a dotted key under every algorithm; a dataclass for a section; [] for an unknown key."""
    *_, named = fields_on_path(config_type, name)
    return [kind for _, hint, inner in named for kind in inner or [hint]]


def _fill(section: Section, layers: Sequence[Layer], defaults: Any) -> None:
    """Add the keys and inner sections of a section with the values of its layers; `defaults` has the defaults."""
    kind = section.kind
    variant = getattr(kind, "name", None)
    for declared, hint, kinds in typed_fields(kind):
        field_name = declared.name
        key = section.prefix + field_name
        marks = marks_of(declared)
        given = [(layer, layer.content[field_name]) for layer in layers if field_name in layer.content]
        if not declared.init:
            for layer, value in given:
                if layer.strict and value != variant:
                    raise UserError(f"{_place(layer)}{key} must be {variant}, got {value}: leave it out")
        elif kinds:
            algorithm = section.sections.get("algorithm")
            if marks.needs is None or getattr(algorithm and algorithm.kind, marks.needs, False):
                inner = _inner_section(marks, hint, given, key, getattr(defaults, field_name))
                section.sections[field_name] = inner
            else:
                _refuse_absent(given, key, marks.needs, algorithm)
        else:
            last = None
            for layer, value in given:
                _check_value(layer, key, value, hint)
                last = layer, [value] if is_list(hint) and _is_one(value) else value
            default = getattr(defaults, field_name)
            section.keys[field_name] = Key(key, hint, default, kind, marks.advanced, marks.read, last)
    known = {declared.name for declared in dataclasses.fields(kind)}
    for layer in layers:
        if layer.strict:
            section.unknown += [(layer, f"{section.prefix}{key}") for key in layer.content if key not in known]


def _inner_section(marks: Marks, hint: Any, given: _Given, key: str, default: Any) -> Section:
    """The section of a field with these marks and this type.

    Args:
        marks: marks of the field.
        hint: its type.
        given: its values.
        key: its dotted name.
        default: its default.
    """
    kind = section_type(hint)
    if marks.variants is not None:
        kind, given = _variant(marks.variants, given, key, default)
        default = default if type(default) is kind else None
    assert kind is not None
    may_be_null = type(None) in options_of(hint)
    optional = may_be_null and marks.needs is None
    is_on = not optional or default is not None
    layers = list[Layer]()
    for layer, value in given:
        content = {} if value is True and optional else value
        if value is None and may_be_null:
            is_on = not optional
            layers = []
        elif isinstance(content, Mapping):
            is_on = True
            layers.append(Layer(content, layer.origin, layer.strict))
        else:
            raise UserError(
                f"{_place(layer)}{key} must be a mapping of keys, got {value}: write its keys under it, or leave it out"
            )
    section = Section(key, kind, marks.advanced, is_on, variants=tuple(marks.variants or ()))
    _fill(section, layers, default or defaults_of(kind))
    read_keys = marks.keys or tuple(section.keys)
    for name in [name for name in section.keys if name not in read_keys]:
        last = section.keys.pop(name).given
        if last is not None and last[0].strict:
            raise UserError(f"{key} reads {', '.join(read_keys)} only, got {name} {last[1]}: leave it out")
    return section


def _variant(variants: Mapping[str, type], given: _Given, key: str, default: Any) -> tuple[type, _Given]:
    """The dataclass that the name in a section selects, and the section's layers as mappings.

    A file of defaults sets keys of its own algorithm only.
    """
    normal = [(layer, {"name": value} if isinstance(value, str) else value) for layer, value in given]
    names = [(layer, value["name"]) for layer, value in normal if isinstance(value, Mapping) and "name" in value]
    chosen = str(names[-1][1]) if names else str(default.name)
    if chosen not in variants:
        raise UserError(
            f"{_place(names[-1][0])}{key} must be one of {', '.join(variants)}, got {chosen}: "
            f"{nearest_hint(chosen, variants, otherwise='give one of them')}"
        )
    selected = []
    for layer, value in normal:
        if isinstance(value, Mapping):
            if not layer.strict and str(value.get("name", default.name)) != chosen:
                continue
            value = {name: inner for name, inner in value.items() if name != "name"}
            if layer.strict:
                _refuse_foreign(variants, layer, key, value, chosen)
        selected.append((layer, value))
    return variants[chosen], selected


def is_list(hint: Any) -> bool:
    """Return True if a key's value is a list of any length."""
    options = options_of(hint)
    lists = (typing.get_origin(option) is list or typing.get_args(option)[1:] == (...,) for option in options)
    return str not in options and any(lists)


def _is_one(value: Any) -> bool:
    """Return True if a value is written for a list of one item."""
    return isinstance(value, Mapping) or (isinstance(value, str) and not value.lstrip().startswith("["))


def _refuse_foreign(
    variants: Mapping[str, type], layer: Layer, section: str, content: Mapping[str, Any], chosen: str
) -> None:
    """Refuse a key of a section that only other algorithms have."""
    for name, value in content.items():
        owners = [variant for variant, kind in variants.items() if name in type_hints(kind)]
        if owners and chosen not in owners:
            named = ", ".join(owners[:3]) + " and others" * (len(owners) > 3)
            known = [f"{section}.{key}" for key in resolve(variants[chosen], []).all_keys(off=True)]
            raise UserError(
                f"{_place(layer)}algorithm {chosen} has no key {section}.{name} ({named} "
                f"{'has' if len(owners) == 1 else 'have'}), got {value}: "
                f"{trl_answer(name, known) or 'leave it out'}"
            )


def _refuse_absent(given: _Given, key: str, needs: str, algorithm: Section | None) -> None:
    for layer, value in given:
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
    _check_null(value, f"{_place(layer)}{key}", hint)
    item_types = [argument for option in options_of(hint) for argument in typing.get_args(option)]
    for item in value if isinstance(value, list) else ():
        for item_type in item_types:
            _check_item(item, layer, f"an item of {key}", item_type)


def _check_item(item: Any, layer: Layer, where: str, hint: Any) -> None:
    """Refuse unknown and missing keys of a mapping that becomes a dataclass."""
    kind = section_type(hint)
    if kind is None or not isinstance(item, Mapping):
        return
    hints = type_hints(kind)
    for name, value in item.items():
        if name not in hints:
            raise UserError(
                f"{_place(layer)}unknown key {name} in {where}: "
                f"{nearest_hint(str(name), hints, otherwise='its keys are ' + ', '.join(hints))}"
            )
        _check_null(value, f"{_place(layer)}{name} in {where}", hints[name])
        _check_item(value, layer, f"{name} of {where}", hints[name])
    for name, default in vars(defaults_of(kind)).items():
        if default is dataclasses.MISSING and name not in item:
            raise UserError(f"{_place(layer)}{where} needs {name}, got {item}: add it")


def _check_null(value: Any, key: str, hint: Any) -> None:
    if value is None and type(None) not in options_of(hint):
        raise UserError(f"{key} must be {type_name(hint)}, got null: give a value, or leave it out")


def unknown_key(name: str, layer: Layer, tree: Section) -> UserError:
    """The error of a key that a config does not have, with the nearest one.

    Args:
        name: dotted key.
        layer: the layer that sets it.
        tree: result of `resolve` for the config.
    """
    sections = [section for section in tree.walk(off=True) if section.name]
    names = [f"{section.name}.name" for section in sections if section.variants]
    known = [*tree.all_keys(off=True), *(section.name for section in sections), *names]
    if not known:
        return UserError(f"{_place(layer)}unknown option --{name}: this command has none")
    option = f"option --{name}" if layer.origin is None else f"key {name}"
    hint = getattr(tree.kind, "retired", {}).get(name) or _hint(name, known)
    return UserError(f"{_place(layer)}unknown {option}: {hint}")


def _hint(wrong: str, known: Sequence[str]) -> str:
    """Advice for an unknown key: a key with the same last name, the equivalent of TRL's name, or a similar key.

    A key in an existing section is compared with the keys of that section, without the section's name.
    """
    section, _, leaf = wrong.rpartition(".")
    if wrong in known:  # in a file
        return f"write {leaf} within {section}"
    if "base_model" in known and wrong in ("model", "model.path"):
        return "give base_model, from which the steps start"
    inside = [name for name in known if name.endswith(f".{wrong}")]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if exact := inside or same_leaf:
        return f"the nearest is {max(exact, key=lambda name: SequenceMatcher(None, wrong, name).ratio())}"
    if answer := trl_answer(wrong, known):
        return answer
    siblings = {name.rpartition(".")[2]: name for name in known if section and name.rpartition(".")[0] == section}
    nearest_name = siblings.get(nearest(leaf, siblings) or "") or nearest(wrong, known)
    return f"the nearest is {nearest_name}" if nearest_name else "--help lists the keys"


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
