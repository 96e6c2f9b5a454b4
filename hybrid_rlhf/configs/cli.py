"""The command line: YAML files and dotted overrides to a frozen config, and back. The only user of
jsonargparse.

Files come first and overrides over them, wherever they stand on the line. What a user gets wrong is one line on
stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from hybrid_rlhf.configs.credentials import redacted
from hybrid_rlhf.configs.disk_faults import disk_fault
from hybrid_rlhf.configs.errors import RankError, UserError
from hybrid_rlhf.configs.files import parse_yaml, read_text
from hybrid_rlhf.configs.presets import flat, nested, preset_values
from hybrid_rlhf.configs.unread import refuse_unread, without_unread
from hybrid_rlhf.configs.values import check_values, is_text
from hybrid_rlhf.configs.whole_files import write_whole

ConfigT = TypeVar("ConfigT")
set_parsing_settings(docstring_parse_attribute_docstrings=True)


def parse_config(
    config_type: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    defaults: Path | None = None,
    positional: str | None = None,
    unread: Literal["refuse", "ignore"] = "refuse",
) -> ConfigT:
    """A config from `--config FILE.yaml` and dotted overrides such as `--optimizer.lr 1e-5`.

    Args:
        config_type: a dataclass of configs/.
        argv: the words of the line; none: the process's own.
        prog: the name that --help shows.
        defaults: a YAML that lies under the user's files.
        positional: a key that the first bare word of the line may give.
        unread: what happens to keys that the user gives and the config does not read (configs/unread.py).

    Raises:
        UserError: for an unknown or unread key, a wrong value, a file that cannot be read, or a rule of the config.
        SystemExit: after --help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if positional is not None and words and not words[0].startswith("-"):
        words[0] = f"--{positional}={words[0]}"
    keys = dotted_keys(config_type)
    files, overrides = _sort_words(words, keys)
    contents = [(file, content) for file in files if (content := _read_file(file, keys))]
    said = [*(flat(content) for _, content in contents), _said(overrides)]
    under = {} if defaults is None else flat(_read_file(str(defaults), keys))
    presets = preset_values(config_type, said, under=under)
    settings = [f"--config={file}" for file, _ in contents]
    settings[:0] = [f"--config={json.dumps(nested(layer))}" for layer in (under, presets) if layer]
    shown = presets if {"-h", "--help"} & {*overrides} else {}
    parser = _parser(config_type, prog, tuple(shown.items()))  # type: ignore[arg-type]
    try:
        parsed = parser.parse_args(settings + overrides)
        sections = parser.instantiate(parsed)
    except (ArgumentError, ValueError) as error:  # ValueError: what an item of a list says of its own values
        raise UserError(_describe(str(error), keys)) from error
    values = {field.name: sections[field.name] for field in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    config = config_type(**values)
    check_values(config)
    if unread == "refuse":
        refuse_unread(config, [key for part in said for key in part])
    return config


def read_config(config: Any) -> dict[str, Any]:
    """A config, or the file that save_config wrote, as dotted keys and plain values."""
    return flat(yaml.safe_load(config.read_text()) if isinstance(config, Path) else _plain(config))


def save_config(config: Any, path: Path) -> None:
    """Write what a config reads, as the YAML that parse_config reads back to one that does the same."""
    write_whole(path, yaml.safe_dump(_plain(config), sort_keys=False))


def dotted_keys(config_type: Any, prefix: str = "") -> dict[str, Any]:
    """Every key of a config with its type, sections opened up."""
    keys: dict[str, Any] = {}
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            keys |= dotted_keys(hint, f"{prefix}{field.name}.")
        else:
            keys[prefix + field.name] = hint
    return keys


def _plain(config: Any) -> dict[str, Any]:
    return without_unread(config, dict(json.loads(json.dumps(dataclasses.asdict(config)))))


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a user's mistake, or a disk's fault, into one line on stderr and exit code 2."""
    try:
        yield
    except UserError as error:
        _stop(str(error), every_rank=isinstance(error, RankError))
    except OSError as error:
        if disk_fault(error) is None:
            raise
        _stop(str(disk_fault(error)), every_rank=True)


def _stop(message: str, *, every_rank: bool) -> NoReturn:
    # Every rank meets the same mistake, and one a host tells it.
    if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        rank = f"rank {os.environ.get('RANK')}: " if every_rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
        print(f"error: {rank}{redacted(message)}", file=sys.stderr, flush=True)
    sys.exit(2)


@functools.cache
def _parser(config_type: Any, prog: str | None, shown: tuple[tuple[str, Any], ...] = ()) -> ArgumentParser:
    """Reads the docstrings of every section, which takes longest of all."""
    keys = dotted_keys(config_type)
    usage = "%(prog)s [--config FILE.yaml] [--KEY VALUE ...]"
    parser = ArgumentParser(prog=prog, exit_on_error=False, usage=usage, print_config=None)
    parser.add_argument("--config", action="config", help="YAML file of keys; may be given more than once")
    parser.add_class_arguments(config_type)
    parser.set_defaults(dict(shown))
    parser.description = (config_type.__doc__ or "").strip()
    for action in parser._actions:  # --help shows the keys, not the parser's other ways to give them
        action.option_strings = [option for option in action.option_strings if not option.endswith("+")]
        if action.dest not in keys and action.dest not in ("help", "config"):
            action.help = argparse.SUPPRESS
    return parser


def _sort_words(words: list[str], keys: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The config files, and the overrides as words of the parser; unknown keys are refused."""
    files: list[str] = []
    overrides: list[str] = []
    faulty = next((word for word in words if not is_text(word)), None)
    if faulty is not None:
        raise UserError(f"the line must be text that UTF-8 can write, got {faulty!r}: write it anew")
    rest = iter(words)
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if word in ("-h", "--help"):
            overrides.append(word)
            continue
        if not word.startswith("--"):
            raise UserError(f"options start with --, got {word!r}: write --KEY VALUE, see --help")
        if name not in keys and not _is_section(name, keys) and name not in ("config", "local_rank"):
            raise UserError(f"unknown option --{name}: {_nearest(name, keys)}")
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise UserError(f"--{name} needs a value, got none: write --{name} VALUE")
        if name == "config":
            files.append(value)
        elif name != "local_rank":  # the deepspeed launcher appends it; LOCAL_RANK says the same
            overrides.append(_override(name, value, keys))
    return files, overrides


def _override(name: str, value: str, keys: Mapping[str, Any]) -> str:
    """A key as `--key=value`, a list or a section as a line of YAML: as a word, a faulty list passes for a string."""
    if _is_list(keys.get(name)):
        value = _as_list(value)
    elif not _is_section(name, keys):
        return f"--{name}={value}"
    _check(parse_yaml(f"{name}: {value}", f"--{name}"), "the command line", keys)
    return f"--config={name}: {value}"


def _said(overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides as dotted keys and values."""
    said: dict[str, Any] = {}
    for word in overrides:
        name, _, value = word.removeprefix("--").partition("=")
        said |= flat(yaml.safe_load(value)) if name == "config" else {name: value}
    return said


def _is_section(name: str, keys: Mapping[str, Any]) -> bool:
    return any(key.startswith(f"{name}.") for key in keys)


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union


def _is_list(hint: Any) -> bool:
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    return str not in options and any(typing.get_origin(option) is list for option in options)


def _as_list(value: str) -> str:
    """A bare word, or one mapping, for a list stands for a list of one."""
    if value.lstrip().startswith("{"):
        return f"[{value}]"
    return value if value.lstrip().startswith("[") or value == "null" else json.dumps([value])


def _read_file(file: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config file; refuses one that is missing, is not YAML, or has a key that no config has."""
    content = parse_yaml(read_text(file, "--config must name a file"), file)
    _check(content, file, keys)
    return content


def _check(content: Mapping[str, Any], origin: str, keys: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse keys that no config has, also in the items of lists, and sections that are no mappings."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        if not _is_section(key, keys):
            if key not in keys:
                raise UserError(f"{origin}: unknown key {key}: {_nearest(key, keys)}")
            _check_null(value, f"{origin}: {key}", keys[key])
            for item in value if isinstance(value, list) else ():
                _check_item(item, origin, key, keys[key])
        elif isinstance(value, dict):
            _check(value, origin, keys, f"{key}.")
        else:
            raise UserError(
                f"{origin}: {key} must be a mapping of keys, got {value}: write its keys under it, or leave it out"
            )


def _check_item(item: Any, origin: str, key: str, hint: Any) -> None:
    kinds = [kind for option in typing.get_args(hint) for kind in typing.get_args(option) or (option,)]
    fields = [field for kind in kinds if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)]
    if not fields or not isinstance(item, dict):
        return
    names = {name: hint for kind in kinds if dataclasses.is_dataclass(kind) for name, hint in dotted_keys(kind).items()}
    for name, value in item.items():
        if name not in names:
            raise UserError(f"{origin}: unknown key {name} in an item of {key}: {_nearest(str(name), names)}")
        _check_null(value, f"{origin}: {name} in an item of {key}", names[name])
    for field in fields:
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in item:
            raise UserError(f"{origin}: an item of {key} needs {field.name}, got {item}: add it")


def _check_null(value: Any, key: str, hint: Any) -> None:
    """The parser takes null for any type inside a section."""
    if value is None and type(None) not in typing.get_args(hint):
        raise UserError(f"{key} must be {_type_name(hint)}, got null: give a value, or leave it out")


def _nearest(wrong: str, keys: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(wrong, keys, n=1, cutoff=0.0)
    same_leaf = [key for key in keys if key.rsplit(".", 1)[-1] == wrong.rsplit(".", 1)[-1]]
    best = difflib.get_close_matches(wrong, same_leaf, n=1, cutoff=0.0) or close
    return f"the nearest is {best[0]}"


def _describe(report: str, keys: Mapping[str, Any]) -> str:
    """The parser's report of a wrong value in one line: the key, its type, the value."""
    key = re.search(r'Parser key "([\w.]+)"', report)
    values = re.findall(r"(?:Got|Given) value: (.*)", report)
    if key and key[1] in keys and values:
        return f"{key[1]} must be {_type_name(keys[key[1]])}, got {values[-1]}: see --help"
    if key and key[1] in keys and "Exceeds the limit" in report:
        return f"{key[1]} must be {_type_name(keys[key[1]])}, got a number of thousands of digits: see --help"
    rule = re.search(r"^ *- (?!Expected|Problem|Not a valid)(.*)", report, re.MULTILINE)
    return rule[1] if rule else f"{' '.join(report.split())}: see --help"


def _type_name(hint: Any) -> str:
    parts = typing.get_args(hint)
    if hint in (type(None), ...):
        return "..." if hint is ... else "null"
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if _is_union(hint):
        return " or ".join(map(_type_name, parts))
    return f"{hint.__name__}[{', '.join(map(_type_name, parts))}]" if parts else str(hint.__name__)
