"""The keys that a config has for given settings: the algorithm's name selects the dataclass of its section, and an
optional section exists once a file or the command line gives one of its keys.

`resolve` turns layers of nested settings, of which later ones override earlier ones, into a tree of sections; each
mistake in a key is an error here, before any value is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.trl_names import trl_answer
from hybrid_rlhf.configs.sections.hints import options_of, section_type, type_hints
from hybrid_rlhf.configs.sections.rules import Marks, default_of, marks_of, nearest, nearest_hint


@dataclass(frozen=True)
class Layer:
    """Settings from one source."""

    content: Mapping[str, Any]
    """Nested settings; a section is a mapping, null, or the name of an algorithm."""
    origin: str | None = None
    """File of the settings; None for the command line or a caller."""
    strict: bool = True
    """True if unknown keys are errors; unknown keys in a file of defaults are dropped."""

    @property
    def place(self) -> str:
        """The file, as errors begin with it."""
        return "" if self.origin is None else f"{self.origin}: "


@dataclass
class Key:
    """One key of a config."""

    name: str
    """Dotted name."""
    hint: Any
    default: Any
    """Default with the present values of other keys."""
    owner: type
    """Dataclass that declares the field."""
    advanced: bool
    read: Callable[[Any], Any] | None = None
    """Converts the user's value; None: pydantic converts it."""
    given: tuple[Layer, Any] | None = None
    """The last layer that sets the key, and its value."""

    @property
    def value(self) -> Any:
        """The value that is set, or the default."""
        return self.default if self.given is None else self.given[1]

    @property
    def usual(self) -> Any:
        """The value without the user's settings: that of a file of defaults, or the default."""
        return self.default if self.is_users else self.value

    @property
    def is_users(self) -> bool:
        """True if the user sets the key."""
        return self.given is not None and self.given[0].strict


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

    @property
    def algorithm(self) -> Any:
        """The class of the algorithm among its sections; None if there is none."""
        chosen = self.sections.get("algorithm")
        return chosen and chosen.kind

    def walk(self, *, off: bool = False) -> Iterator[Section]:
        """Iterate over this section and its inner ones; with `off` also over unused ones."""
        yield self
        for section in self.sections.values():
            if section.is_on or off:
                yield from section.walk(off=off)

    def all_keys(self, *, off: bool = False) -> dict[str, Key]:
        """Every key by its dotted name."""
        return {key.name: key for section in self.walk(off=off) for key in section.keys.values()}


def resolve(config_type: type, layers: Sequence[Layer]) -> Section:
    """The sections and keys of a config, with the values of the layers.

    Raises:
        UserError: for a key that the config does not have with these settings, with the nearest one, a section that is
            not a mapping, or null for a key that may not be null.
    """
    tree = Section("", config_type)
    _fill(tree, layers, {})
    for section in tree.walk(off=True):
        for layer, name in section.unknown:
            raise unknown_key(name, layer, tree)
    _derive(tree)
    return tree


def _derive(tree: Section) -> None:
    """Set the defaults that follow from other settings: an algorithm sets the number of completions per prompt, the
    size of a rollout sets its mini-batches.

    Those of an algorithm override a file of defaults (the demo's), and the user's settings override them, so that the
    resolved config and `--help` show the number.
    """
    keys = tree.all_keys()
    for section in tree.walk():
        for name, value in getattr(section.algorithm, "defaults_elsewhere", {}).items():
            key = keys[section.prefix + name]
            key.default = value
            key.given = key.given if key.is_users else None
    for section in reversed([*tree.walk()]):  # those of inner sections first
        for name, follow in getattr(section.kind, "following", {}).items():
            key = keys[section.prefix + name]
            values = {inner.removeprefix(section.prefix): each.value for inner, each in section.all_keys().items()}
            key.default = follow(values | {name: key.default})


TypedField = tuple[dataclasses.Field[Any], Any, list[type]]
"""A field, its type, and the dataclasses that it may have as a section; [] for a key."""
_Given = list[tuple[Layer, Any]]
"""The values of a key or a section in the layers that set it."""


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
    *above, named = fields_on_path(config_type, name)
    if name.endswith(".name") and any(marks_of(section).variants for section, _, _ in above[-1]):
        return [str]
    return [kind for _, hint, inner in named for kind in inner or [hint]]


def _fill(section: Section, layers: Sequence[Layer], defaults: Mapping[str, Any]) -> None:
    """Add the keys and inner sections of a section with the values of its layers; `defaults` override those of its
    class."""
    kind = section.kind
    for declared, hint, kinds in typed_fields(kind):
        name = declared.name
        key = section.prefix + name
        marks = marks_of(declared)
        default = defaults.get(name, default_of(declared))
        given = [(layer, layer.content[name]) for layer in layers if name in layer.content]
        if not kinds:
            last = given[-1] if given else None
            section.keys[name] = Key(key, hint, default, kind, marks.advanced, marks.read, last)
        elif marks.needs is None or getattr(section.algorithm, marks.needs, False):
            section.sections[name] = _inner_section(marks, hint, given, key, default)
        else:
            _refuse_absent(given, key, marks.needs, section.algorithm)
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
        kind, given = _variant(marks.variants, given, key)
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
                f"{layer.place}{key} must be a mapping of keys, got {value}: write its keys under it, or leave it out"
            )
    section = Section(key, kind, marks.advanced, is_on, variants=tuple(marks.variants or ()))
    _fill(section, layers, default or {})
    read_keys = marks.keys or tuple(section.keys)
    for name in [name for name in section.keys if name not in read_keys]:
        unread = section.keys.pop(name)
        if unread.is_users:
            raise UserError(f"{key} reads {', '.join(read_keys)} only, got {name} {unread.value}: leave it out")
    return section


def _variant(variants: Mapping[str, type], given: _Given, key: str) -> tuple[type, _Given]:
    """The dataclass that the name in a section selects, and the section's layers as mappings.

    A file of defaults sets keys of its own algorithm only.
    """
    normal = [(layer, {"name": value} if isinstance(value, str) else value) for layer, value in given]
    names = [(layer, value["name"]) for layer, value in normal if isinstance(value, Mapping) and "name" in value]
    usual = next(iter(variants))
    chosen = str(names[-1][1]) if names else usual
    if chosen not in variants:
        raise UserError(
            f"{names[-1][0].place}{key} must be one of {', '.join(variants)}, got {chosen}: "
            f"{nearest_hint(chosen, variants, otherwise='give one of them')}"
        )
    selected = []
    for layer, value in normal:
        if isinstance(value, Mapping):
            if not layer.strict and str(value.get("name", usual)) != chosen:
                continue
            value = {name: inner for name, inner in value.items() if name != "name"}
            if layer.strict:
                _refuse_foreign(variants, layer, key, value, chosen)
        selected.append((layer, value))
    return variants[chosen], selected


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
                f"{layer.place}algorithm {chosen} has no key {section}.{name} ({named} "
                f"{'has' if len(owners) == 1 else 'have'}), got {value}: "
                f"{trl_answer(name, known) or 'leave it out'}"
            )


def _refuse_absent(given: _Given, key: str, needs: str, algorithm: Any) -> None:
    for layer, value in given:
        if layer.strict and value is not None:
            while isinstance(value, Mapping) and value:
                name, value = next(iter(value.items()))
                key = f"{key}.{name}"
            raise UserError(
                f"{layer.place}algorithm {algorithm.name} has no {needs.removeprefix('needs_')}, got {key} {value}: "
                "leave it out"
            )


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
    option = f"unknown option --{name}" if layer.origin is None else f"unknown key {name}"
    hint = getattr(tree.kind, "retired", {}).get(name) or _hint(name, known)
    return UserError(f"{layer.place}{option}: {hint}")


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
