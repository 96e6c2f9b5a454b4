"""From command-line words and nested settings to a frozen config, and back.

Later settings override earlier ones, and overrides on the command line override its files, in any order; a switch
without a value is on. A word is YAML if its key may have the value that it then has, and a text otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import typing
from collections import deque
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, TypeVar

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.other_systems import advice
from hybrid_rlhf.configs.parsing.schema import Layer, Section, find_hints, resolve, unknown_key, with_prefix
from hybrid_rlhf.configs.parsing.values import check_values, is_text
from hybrid_rlhf.configs.parsing.yaml_text import yaml_value
from hybrid_rlhf.configs.sections.hints import is_list, options_of
from hybrid_rlhf.configs.sections.rules import marks_of, require

ConfigT = TypeVar("ConfigT")


def build_config(config_type: type[ConfigT], layers: Sequence[Layer]) -> ConfigT:
    """Build a config from nested settings; later layers override earlier ones.

    Raises:
        UserError: for an unknown key, a wrong value, or a rule of the config.
    """
    tree = resolve(config_type, layers)
    config: ConfigT = _instance(tree, tree)
    check_values(config)
    return config


def config_tree(config_type: type, argv: Sequence[str] = ()) -> Section:
    """The sections and keys that a config has for a command line."""
    return resolve(config_type, read_words(argv, config_type)[1])


def settings_and_defaults(config: Any) -> dict[str, tuple[Any, Any]]:
    """Every dotted key of a config with its value and its default, as plain values.

    The defaults include those of the config's algorithm.
    """
    tree = resolve(type(config), [Layer(plain(config))])
    return {name: (key.value, _readable(key.default)) for name, key in tree.all_keys().items() if key.given}


def plain(config: Any, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    """A config as nested keys and plain values; `keys` are the keys that its place reads, None for all."""
    content: dict[str, Any] = {}
    for declared in dataclasses.fields(config):
        if keys is not None and declared.name not in keys:
            continue
        value = getattr(config, declared.name)
        marks = marks_of(declared)
        if marks.read is not None and value is not None:
            value = value.as_given()
        if dataclasses.is_dataclass(value):
            name = {"name": value.name} if marks.variants else {}  # type: ignore[union-attr]
            content[declared.name] = name | plain(value, marks.keys)
        elif value is not None or marks.needs is None:
            content[declared.name] = _readable(value)
    return content


def _readable(value: Any) -> Any:
    """A value as JSON represents it."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested sections."""
    content: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return content


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    dotted: dict[str, Any] = {}
    for name, value in content.items():
        dotted |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return dotted


def read_words(
    words: Sequence[str], config_type: type, positional: Sequence[str] = ()
) -> tuple[list[str], list[Layer], str | None]:
    """The config files on a command line, its overrides as layers, and the word that requests help, or None.

    Args:
        words: the words of the command line.
        config_type: type of the command's config.
        positional: keys whose values the first words may give without their names; a list takes all words up to the
            first option, and is alone.

    Raises:
        UserError: for a word that is not an option, an unknown key, or a missing value.
    """
    words = _with_positional(list(words), positional, config_type)
    files: list[str] = []
    overrides: list[Layer] = []
    wants_help: str | None = None
    for word in words:
        require(is_text(word), f"the line must be text that UTF-8 can write, got {word!r}: write it again")
    rest = deque(words)
    while rest:
        word = rest.popleft()
        name, equals, value = word.removeprefix("--").partition("=")
        if word in ("-h", "--help", "--help-all"):
            wants_help = word if wants_help != "--help-all" else wants_help
            continue
        if not word.startswith("--"):
            ported = advice(word.partition("=")[0], [*resolve(config_type, []).all_keys(off=True)])
            fix = "write --KEY VALUE, and a list as '[A, B]', see --help"
            raise UserError(f"options start with --, got {word!r}: {ported or fix}")
        hints = find_hints(config_type, name)
        if not hints and name not in ("config", "local_rank"):
            raise unknown_key(name, Layer({}), resolve(config_type, []))
        if not equals:
            has_value = bool(rest) and not rest[0].startswith("--")
            require(has_value or bool in hints, f"--{name} needs a value, got none: write --{name} VALUE")
            value = rest.popleft() if has_value else "true"
        if name == "config":
            files.append(value)
        elif name != "local_rank":  # the deepspeed launcher appends it; LOCAL_RANK has the same value
            overrides.append(Layer(nested({name: _value(name, value, hints)})))
    return files, overrides, wants_help


def _instance(section: Section, tree: Section) -> Any:
    """The dataclass of a section of a tree, from its values."""
    try:
        content = {name: key.value if key.read is None else key.read(key.value) for name, key in section.keys.items()}
        content |= {name: _instance(inner, tree) if inner.is_on else None for name, inner in section.sections.items()}
        return section.kind(**content)
    except UserError as error:  # a section names its keys without itself
        text = with_prefix(str(error), section, tree)
        key = section.keys.get(text.split()[0].removesuffix(":"))
        place = key.given[0].place if key and key.given else ""
        raise UserError(text if key is None else f"{place}{section.prefix}{text}") from None


def _with_positional(words: list[str], keys: Sequence[str], config_type: type) -> list[str]:
    """Replace the words before the first option by options for the positional keys."""
    first = [*itertools.takewhile(lambda word: not word.startswith("-"), words)]
    takes_all = any(is_list(hint) for key in keys[:1] for hint in find_hints(config_type, key))
    values = [json.dumps(first)] if first and takes_all else first
    named = [f"--{key}={value}" for key, value in zip(keys, values, strict=False)]
    return [*named, *values[len(keys) :], *words[len(first) :]]


def _value(name: str, text: str, hints: list[Any]) -> Any:
    """The value of an override: YAML, if its type is one of those that the key may have; otherwise the text."""
    is_structure = text.lstrip().startswith(("[", "{"))
    options = [option for hint in hints for option in options_of(hint)]
    kinds = {typing.get_origin(option) or option for option in options}
    choices = [value for option in options if typing.get_origin(option) is Literal for value in typing.get_args(option)]
    if any(map(dataclasses.is_dataclass, kinds)):
        kinds |= {dict, bool, NoneType}
    if kinds & {list, tuple}:
        kinds |= {list, NoneType, dict} if is_structure else {NoneType}
    try:
        value = yaml_value(text, f"--{name}") if text.strip() else text
    except UserError:
        if is_structure and kinds & {list, dict}:
            raise
        return text
    return value if type(value) in kinds or value in choices else text
