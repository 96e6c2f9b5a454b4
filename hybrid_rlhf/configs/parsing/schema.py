"""The keys that a config has for given settings: the algorithm's name selects the dataclass of its section, and an
optional section exists once a file or the command line gives one of its keys.

`resolve` turns layers of nested settings, of which later ones override earlier ones, into a tree of sections; each
mistake in a key is an error here, before any value is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.other_systems import advice, is_option, value_advice
from hybrid_rlhf.configs.sections.hints import options_of, section_type, type_hints
from hybrid_rlhf.configs.sections.rules import Marks, default_of, marks_of, nearest, nearest_hint, space_hint


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
    unknown: list[tuple[Layer, str, Any]] = field(default_factory=list)
    """Keys that a strict layer sets, and the section does not have, with their values."""
    variants: Mapping[str, type] = field(default_factory=dict)
    """The dataclasses among which this section selects, by their names."""

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
        for layer, name, value in section.unknown:
            raise _foreign_key(section, layer, name, value) or unknown_key(f"{section.prefix}{name}", layer, tree)
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


def _fill(
    section: Section, layers: Sequence[Layer], defaults: Mapping[str, Any], read_keys: Sequence[str] | None = None
) -> None:
    """Add the keys and inner sections of a section with the values of its layers.

    Args:
        section: the section.
        layers: its settings.
        defaults: defaults that override those of its class.
        read_keys: the keys that its place reads; None for all.
    """
    known = set[str]()
    for declared, hint, kinds in typed_fields(section.kind):
        name = declared.name
        known.add(name)
        marks = marks_of(declared)
        default = defaults.get(name, default_of(declared))
        given = [(layer, layer.content[name]) for layer in layers if name in layer.content]
        key = Key(
            section.prefix + name, hint, default, section.kind, marks.advanced, marks.read, given[-1] if given else None
        )
        if kinds:
            if marks.needs is None or getattr(section.algorithm, marks.needs, False):
                section.sections[name] = _inner_section(key, marks, given)
            else:
                _refuse_absent(given, key.name, marks.needs, section.algorithm)
        elif read_keys is None or name in read_keys:
            section.keys[name] = key
        elif key.is_users:
            raise UserError(f"{section.name} reads {', '.join(read_keys)} only, got {name} {key.value}: leave it out")
    for layer in layers:
        if layer.strict:
            section.unknown += [(layer, name, value) for name, value in layer.content.items() if name not in known]


def _inner_section(key: Key, marks: Marks, given: Sequence[tuple[Layer, Any]]) -> Section:
    """The section of a field, from its values in the layers that set it."""
    kind = section_type(key.hint)
    if marks.variants is not None:
        kind, given = _variant(marks.variants, given, key.name)
    may_be_null = type(None) in options_of(key.hint)
    optional = may_be_null and marks.needs is None
    is_on = not optional or key.default is not None
    layers = list[Layer]()
    for layer, value in given:
        content = {} if value is True and optional else value
        if value is None and may_be_null:
            is_on = not optional
            layers = []
        elif isinstance(content, Mapping):
            is_on = True
            layers.append(replace(layer, content=content))
        else:
            fix = f"set {key.name}.{next(iter(type_hints(kind)))} or another of its keys, or leave it out"
            raise UserError(f"{layer.place}{key.name} must be a mapping of keys, got {value}: {fix}")
    section = Section(key.name, kind, key.advanced, is_on, variants=marks.variants or {})
    _fill(section, layers, key.default or {}, marks.keys)
    return section


def _variant(
    variants: Mapping[str, type], given: Sequence[tuple[Layer, Any]], key: str
) -> tuple[type, list[tuple[Layer, Any]]]:
    """The dataclass that the name in a section selects, and the section's values without it.

    A file of defaults sets keys of its own algorithm only.
    """
    normal = [(layer, {"name": value} if isinstance(value, str) else value) for layer, value in given]
    names = [(layer, value["name"]) for layer, value in normal if isinstance(value, Mapping) and "name" in value]
    usual = next(iter(variants))
    chosen = str(names[-1][1]) if names else usual
    if chosen not in variants:
        fix = getattr(variants[usual], "papers", {}).get(chosen)
        if fix is None and (ported := value_advice(f"{key}.name", chosen, variants)):
            fix = f"give {ported}"
        fix = fix or nearest_hint(chosen, variants, otherwise="give one of them")
        raise UserError(f"{names[-1][0].place}{key} must be one of {', '.join(variants)}, got {chosen}: {fix}")
    selected = []
    for layer, value in normal:
        if isinstance(value, Mapping):
            if not layer.strict and str(value.get("name", usual)) != chosen:
                continue
            value = {name: inner for name, inner in value.items() if name != "name"}
        selected.append((layer, value))
    return variants[chosen], selected


def _refuse_absent(given: Sequence[tuple[Layer, Any]], key: str, needs: str, algorithm: Any) -> None:
    for layer, value in given:
        if layer.strict and value is not None:
            while isinstance(value, Mapping) and value:
                name, value = next(iter(value.items()))
                key = f"{key}.{name}"
            raise UserError(
                f"{layer.place}algorithm {algorithm.name} has no {needs.removeprefix('needs_')}, got {key} {value}: "
                "leave it out"
            )


def _foreign_key(section: Section, layer: Layer, name: str, value: Any) -> UserError | None:
    """The error of a key of a section that only other algorithms have; None for any other key."""
    owners = [variant for variant, kind in section.variants.items() if name in type_hints(kind)]
    chosen: Any = section.kind
    if not owners or chosen.name in owners:
        return None
    named = ", ".join(owners[:3]) + " and others" * (len(owners) > 3)
    ported = advice(name, [*section.all_keys(off=True)]) or ""  # of the keys that this algorithm has
    return UserError(
        f"{layer.place}algorithm {chosen.name} has no key {section.prefix}{name} ({named} "
        f"{'has' if len(owners) == 1 else 'have'}), got {value}: "
        f"{ported if ported.startswith('give ') else 'leave it out'}"
    )


def with_prefix(text: str, section: Section, tree: Section) -> str:
    """A message of a section with its dotted keys as the whole config has them, unless it has these itself."""
    known, names = (
        {*part.all_keys(off=True), *(inner.name for inner in part.walk(off=True))} for part in (tree, section)
    )
    keys = {name.removeprefix(section.prefix) for name in names} - known
    pattern = "|".join(re.escape(key) for key in sorted(keys, key=len, reverse=True) if "." in key)
    return re.sub(rf"(?<![\w.])(?:{pattern})(?![\w])", rf"{section.prefix}\g<0>", text) if pattern else text


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
    retired = (
        with_prefix(text, section, tree)
        for section in tree.walk()
        for key, text in getattr(section.kind, "retired", {}).items()
        if name == section.prefix + key
    )
    return UserError(f"{layer.place}{option}: {next(retired, None) or _hint(name, known)}")


def _hint(wrong: str, known: Sequence[str]) -> str:
    """Advice for an unknown key: a key with the same last name, the equivalent of TRL's name, or a similar key.

    A key in an existing section is compared with the keys of that section, without the section's name.
    """
    section, _, leaf = wrong.rpartition(".")
    if wrong in known:  # in a file
        return f"write {leaf} within {section}"
    if unspaced := space_hint(wrong, known):
        return unspaced
    if "base_model" in known and wrong in ("model", "model.path"):
        return "give base_model, from which the steps start"
    if (not section or is_option(wrong)) and (answer := advice(wrong, known)):
        return answer
    inside = [name for name in known if name.endswith(f".{wrong}")]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if exact := inside or same_leaf:
        return f"the nearest is {max(exact, key=lambda name: SequenceMatcher(None, wrong, name).ratio())}"
    if answer := advice(wrong, known):
        return answer
    siblings = {name.rpartition(".")[2]: name for name in known if section and name.rpartition(".")[0] == section}
    nearest_name = siblings.get(nearest(leaf, siblings) or "") or nearest(wrong, known)
    return f"the nearest is {nearest_name}" if nearest_name else "--help lists the keys"
