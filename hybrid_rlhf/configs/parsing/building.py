"""From command-line words and nested settings to a frozen config, and back.

Later settings override earlier ones, and overrides on the command line override its files, in any order; a switch
without a value is on. pydantic reads the values, and is imported only when a config is built, not for `--help`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.schema import (
    Key,
    Layer,
    Section,
    find_hints,
    is_list,
    resolve,
    type_name,
    unknown_key,
)
from hybrid_rlhf.configs.parsing.values import check_values, is_text
from hybrid_rlhf.configs.parsing.yaml_text import parse_yaml, yaml_value
from hybrid_rlhf.configs.sections.rules import marks_of, require

ConfigT = TypeVar("ConfigT")


def build_config(config_type: type[ConfigT], layers: Sequence[Layer]) -> ConfigT:
    """Build a config from nested settings; later layers override earlier ones.

    Raises:
        UserError: for an unknown key, a wrong value, or a rule of the config.
    """
    tree = resolve(config_type, layers)
    settings = tree.values() | derived_defaults(tree)
    typed = {name: _typed(key, settings[name]) for name, key in tree.all_keys().items() if name in settings}
    config: ConfigT = _instance(tree, tree.defaults() | typed)
    check_values(config)
    return config


def config_tree(config_type: type, argv: Sequence[str] = ()) -> Section:
    """The sections and keys that a config has for a command line."""
    return resolve(config_type, read_words(argv, config_type)[1])


def settings_and_defaults(config: Any) -> dict[str, tuple[Any, Any]]:
    """Every dotted key of a config with its value and its default, as plain values.

    The defaults include those of the config's algorithm.
    """
    tree = resolve(type(config), [Layer(plain(config), strict=False)])
    defaults = tree.defaults() | derived_defaults(tree)
    return {key: (value, _readable(defaults[key])) for key, value in tree.values().items()}


def derived_defaults(tree: Section) -> dict[str, Any]:
    """The defaults that follow from other settings, by dotted key: an algorithm sets the number of completions per
    prompt, the size of a rollout sets its mini-batches.

    They override a file of defaults (the demo's), and the user's settings override them, so that the resolved config
    and `--help` show the number.
    """
    user = tree.user_keys()
    values = tree.values()
    derived: dict[str, Any] = {}
    for section in tree.walk():
        algorithm = section.sections.get("algorithm")
        for key, value in getattr(algorithm and algorithm.kind, "defaults_elsewhere", {}).items():
            if section.prefix + key not in user:
                derived[section.prefix + key] = value
    settled = {*values} - {*derived}
    for section in reversed([*tree.walk()]):  # those of inner sections first
        prefix = section.prefix
        for name, follow in getattr(section.kind, "following", {}).items():
            if prefix + name not in settled:
                known = tree.defaults() | values | derived
                inside = {key.removeprefix(prefix): known[key] for key in known if key.startswith(prefix)}
                derived[prefix + name] = follow(inside)
    return derived


def plain(config: Any, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    """A config as nested keys and plain values; `keys` are the keys that its place reads, None for all."""
    content: dict[str, Any] = {}
    for declared in dataclasses.fields(config):
        value = getattr(config, declared.name)
        marks = marks_of(declared)
        if keys is not None and declared.name not in keys:
            continue
        if marks.read is not None and value is not None:
            value = value.as_given()
        if dataclasses.is_dataclass(value):
            content[declared.name] = plain(value, marks.keys)
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
            first option.

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
        require(word.startswith("--"), f"options start with --, got {word!r}: write --KEY VALUE, see --help")
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


@functools.cache
def _adapter(hint: Any) -> Any:
    """pydantic's TypeAdapter, which reads values of a type."""
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _typed(key: Key, value: Any) -> Any:
    """The typed value of a key. A text is read as YAML first, and as plain text if the result has another type; the
    words of a list are read as plain text first."""
    readings = [value]
    with contextlib.suppress(UserError):
        if isinstance(value, list):
            readings += [[yaml_value(item, key.name) if isinstance(item, str) else item for item in value]]
        elif isinstance(value, str) and value.strip():
            readings = [yaml_value(value, key.name), value]
    for reading in readings:
        try:
            typed = _adapter(key.hint).validate_json(json.dumps(reading, default=dataclasses.asdict), strict=True)
            if key.hint == dict[str, Any]:
                return reading  # JSON makes texts of other names, which the section refuses
            return typed if key.read is None else key.read(typed)
        except UserError as error:  # an item of a list names its own keys
            text = str(error)
            is_item = is_list(key.hint) and not key.name.endswith(text.partition(":")[0])
            raise UserError(f"{key.name}: {text}" if is_item else text) from None
        except (TypeError, ValueError) as error:  # TypeError: a date, or another type that JSON lacks
            place = next(iter(error.errors()[0]["loc"]), None) if hasattr(error, "errors") else None
            if reading is readings[0]:
                is_item = isinstance(reading, list) and isinstance(place, int) and place < len(reading)
                wrong = reading[place] if is_item else reading
                if is_item and isinstance(wrong, Mapping) and (rule := _wrong_key(error)):
                    raise UserError(f"{key.name}: {rule}") from None
    shown = "a number of thousands of digits" if re.fullmatch(r"\d{1000,}", str(wrong)) else wrong
    raise UserError(f"{key.name} must be {type_name(key.hint)}, got {shown}: see --help")


def _wrong_key(error: Any) -> str:
    """The rule of the key within an item that has a wrong value, as pydantic found it; empty if the item is wrong as a
    whole."""
    first = max(error.errors(), key=lambda each: len(each["loc"]))
    if len(first["loc"]) < 3:  # number of the item, type of the item, key
        return ""
    rule = first["msg"].removeprefix("Input should be ")
    return f"{first['loc'][-1]} must be {rule}, got {first['input']}: change it"


def _instance(section: Section, values: Mapping[str, Any]) -> Any:
    """The dataclass of a section, from typed values by dotted key."""
    content = {name: values[key.name] for name, key in section.keys.items()}
    content |= {name: _instance(inner, values) if inner.is_on else None for name, inner in section.sections.items()}
    try:
        return section.kind(**content)
    except UserError as error:  # the dataclass names the key without its section
        text = str(error)
        raise UserError(section.prefix + text if text.split()[0] in section.keys else text) from None


def _with_positional(words: list[str], keys: Sequence[str], config_type: type) -> list[str]:
    """Replace the words before the first option by options for the positional keys."""
    first = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    rest = words[len(first) :]
    named = list[str]()
    for key in keys:
        if first and any(map(is_list, find_hints(config_type, key))):
            named = [*named, f"--{key}={json.dumps(first)}"]
            first = []
        elif first:
            named.append(f"--{key}={first.pop(0)}")
    return [*named, *first, *rest]


def _value(name: str, text: str, hints: list[Any]) -> Any:
    """The value of an override: YAML for a list or a section; otherwise text, which is read by the type of its key."""
    is_section = any(map(dataclasses.is_dataclass, hints))
    if is_section and re.fullmatch(r"\w+", text) and text not in ("null", "true", "false"):
        return text  # the name of an algorithm
    if any(map(is_list, hints)):
        text = _as_list(text)
    elif not is_section:
        return text
    return parse_yaml(f"value: {text}", f"--{name}")["value"]


def _as_list(value: str) -> str:
    """A bare word, or a single mapping, is written as a list of one item."""
    if value.lstrip().startswith("{"):
        return f"[{value}]"
    return value if value.lstrip().startswith("[") or value == "null" else json.dumps([value])
