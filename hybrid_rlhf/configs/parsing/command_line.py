"""The command line: YAML files and dotted overrides to a frozen config, and back. The only user of jsonargparse.

Files come first and overrides over them, wherever they stand on the line; a switch without a value is on. A user's
mistake is one line on stderr and exit code 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from hybrid_rlhf.configs.errors import RankError, UserError
from hybrid_rlhf.configs.files.atomic import write_whole
from hybrid_rlhf.configs.files.credentials import redacted
from hybrid_rlhf.configs.files.disk_faults import disk_fault
from hybrid_rlhf.configs.files.reading import parse_yaml, read_text
from hybrid_rlhf.configs.parsing.derived import derived_defaults
from hybrid_rlhf.configs.parsing.help import help_document, help_text
from hybrid_rlhf.configs.parsing.output import print_document, print_result, wants_json
from hybrid_rlhf.configs.parsing.schema import (
    Key,
    Layer,
    Section,
    UnknownKey,
    check_null,
    find_hints,
    is_list,
    resolve,
    type_name,
    unknown_key,
)
from hybrid_rlhf.configs.parsing.values import check_values, is_text
from hybrid_rlhf.configs.sections.rules import marks_of

ConfigT = TypeVar("ConfigT")
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
ERROR_FILE = "HYBRID_RLHF_ERROR_FILE"
"""Environment variable with a file that a process writes a user's mistake to, for a command that started it: a launcher
in between may end with another exit code."""


def parse_config(
    config_type: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    defaults: Path | None = None,
    positional: str | Sequence[str] = (),
) -> ConfigT:
    """A config from `--config FILE.yaml` and dotted overrides such as `--optimizer.lr 1e-5`.

    Args:
        config_type: a dataclass of configs/.
        argv: the words of the line; none: the process's own.
        prog: the name that --help shows.
        defaults: a YAML file that lies under the user's files.
        positional: keys whose values the first words of the line may give without their names; a list takes all words
            up to the first option.

    Raises:
        UserError: for an unknown key, a wrong value, a file that cannot be read, or a rule of the config.
        SystemExit: after --help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    positional = [positional] if isinstance(positional, str) else positional
    words = _with_positional(words, positional, config_type)
    files, overrides, wants_help = _sort_words(words, config_type)
    layers = [] if defaults is None else [Layer(_read_file(str(defaults)), str(defaults), strict=False)]
    layers += [Layer(_read_file(file), file) for file in files]
    layers += overrides
    if wants_help:
        tree = _resolved(config_type, layers)
        prog = prog or Path(sys.argv[0]).name
        derived = derived_defaults(tree)
        if defaults is not None:
            derived |= _resolved(config_type, layers[:1]).values()
        how: Any = {"prog": prog, "everything": wants_help == "--help-all", "positional": positional}
        print_result(help_document(tree, derived, **how), help_text(tree, derived, **how).rstrip("\n"))
        sys.exit(0)
    return build_config(config_type, layers)


def build_config(config_type: type[ConfigT], layers: Sequence[Layer]) -> ConfigT:
    """A config from nested settings, the later layers over the earlier.

    Raises:
        UserError: for an unknown key, a wrong value, or a rule of the config.
    """
    tree = _resolved(config_type, layers)
    keys, user = tree.all_keys(), tree.user_keys()
    values = tree.values() | {key: value for key, value in derived_defaults(tree).items() if key not in user}
    parser = _parser(tuple((key.name, key.hint) for key in keys.values()))
    defaults = {key.name: key.default for key in keys.values()}
    try:
        parsed = parser.instantiate(parser.parse_object(nested(defaults | values)))
    except (ArgumentError, ValueError, TypeError) as error:  # ValueError: the rule of an item of a list
        raise UserError(_describe(str(error), keys)) from error
    config: ConfigT = _instance(tree, parsed)
    check_values(config)
    return config


def config_tree(config_type: type, argv: Sequence[str] = ()) -> Section:
    """The sections and keys that a config has for a command line."""
    return _resolved(config_type, _sort_words(list(argv), config_type)[1])


def settings_and_defaults(config: Any) -> dict[str, tuple[Any, Any]]:
    """Every dotted key of a config with its value and its default, as plain values.

    The defaults are those that the algorithm of the config brings.
    """
    tree = _resolved(type(config), [Layer(plain(config))])
    values = tree.values()
    for section in tree.walk():
        section.strictly_given.clear()
    defaults = {key.name: key.default for key in tree.all_keys().values()} | derived_defaults(tree)
    readable = {key: json.loads(json.dumps(defaults[key], default=dataclasses.asdict)) for key in defaults}
    return {key: (value, readable.get(key)) for key, value in values.items()}


def read_config(config: Any) -> dict[str, Any]:
    """A config, or the file that save_config wrote, as dotted keys and plain values."""
    return flat(yaml.safe_load(config.read_text()) if isinstance(config, Path) else plain(config))


def save_config(config: Any, path: Path) -> None:
    """Write a config as the YAML that parse_config reads back."""
    write_whole(path, yaml.safe_dump(plain(config), sort_keys=False))


def plain(config: Any, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    """A config as nested keys and plain values, without keys that a place does not read."""
    content: dict[str, Any] = {}
    for declared in dataclasses.fields(config):
        value, marks = getattr(config, declared.name), marks_of(declared)
        if keys is not None and declared.name not in keys:
            continue
        if dataclasses.is_dataclass(value):
            content[declared.name] = plain(value, marks.keys)
        elif value is not None or marks.needs is None:
            content[declared.name] = json.loads(json.dumps(value, default=dataclasses.asdict))
    return content


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections."""
    content: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return content


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections as dotted keys."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a user's mistake, or a disk's fault, into one line on stderr, or JSON on stdout, and exit code 2; Ctrl-C
    into the line "stopped" and the exit code that shells give it."""
    file = os.environ.pop(ERROR_FILE, None)  # not for the processes that this one starts
    try:
        yield
    except UserError as error:
        _stop(str(error), file, every_rank=isinstance(error, RankError))
    except OSError as error:
        if disk_fault(error) is None:
            raise
        _stop(str(disk_fault(error)), file, every_rank=True)
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            if wants_json():
                print_document({"error": "stopped"})
            else:
                print("stopped", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED_EXIT_CODE)


def _stop(message: str, file: str | None, *, every_rank: bool) -> NoReturn:
    # Every rank meets the same mistake, and one per host reports it.
    if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        rank = f"rank {os.environ.get('RANK')}: " if every_rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
        line = f"{rank}{redacted(message)}"
        if file is not None:
            with contextlib.suppress(OSError), Path(file).open("x", encoding="utf-8") as place:  # the first rank's
                place.write(line)
        if wants_json():
            print_document({"error": line})
        else:
            print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(2)


def _resolved(config_type: type, layers: Sequence[Layer]) -> Section:
    try:
        return resolve(config_type, layers)
    except UnknownKey as error:
        raise unknown_key(error, config_type, layers) from None


@functools.cache
def _parser(keys: tuple[tuple[str, Any], ...]) -> ArgumentParser:
    """A parser of the types of dotted keys."""
    parser = ArgumentParser(exit_on_error=False, print_config=None)
    for name, hint in keys:
        parser.add_argument(f"--{name}", type=hint)
    return parser


def _instance(section: Section, parsed: Any) -> Any:
    """The dataclass of a section, from parsed values."""
    values = {}
    for name, key in section.keys.items():
        check_null(parsed[name], key.name, key.hint)
        values[name] = parsed[name]
    for name, inner in section.sections.items():
        values[name] = _instance(inner, parsed[name] if name in parsed else Namespace()) if inner.is_on else None
    try:
        return section.kind(**values)
    except UserError as error:  # a rule of sampling parameters, which are used in several sections, names a bare key
        text = str(error)
        raise UserError(
            f"{section.name}.{text}" if section.name and text.split()[0] in section.keys else text
        ) from None


def _with_positional(words: list[str], keys: Sequence[str], config_type: type) -> list[str]:
    """The words with those before the first option as the values of keys."""
    first = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    rest, named = words[len(first) :], list[str]()
    for key in keys:
        if first and any(map(is_list, find_hints(config_type, key))):
            named, first = [*named, f"--{key}={json.dumps(first)}"], []
        elif first:
            named.append(f"--{key}={first.pop(0)}")
    return [*named, *first, *rest]


def _sort_words(words: list[str], config_type: type) -> tuple[list[str], list[Layer], str | None]:
    """The config files, the overrides as layers, and the word that asks for help."""
    files: list[str] = []
    overrides: list[Layer] = []
    wants_help: str | None = None
    faulty = next((word for word in words if not is_text(word)), None)
    if faulty is not None:
        raise UserError(f"the line must be text that UTF-8 can write, got {faulty!r}: write it again")
    rest = deque(words)
    while rest:
        word = rest.popleft()
        name, equals, value = word.removeprefix("--").partition("=")
        if word in ("-h", "--help", "--help-all"):
            wants_help = word if wants_help != "--help-all" else wants_help
            continue
        if not word.startswith("--"):
            raise UserError(f"options start with --, got {word!r}: write --KEY VALUE, see --help")
        if name not in ("config", "local_rank") and not _is_known(config_type, name):
            raise unknown_key(UnknownKey(name, Layer({})), config_type, [])
        hints = find_hints(config_type, name)
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.popleft()
        elif not equals and bool in hints:
            value = "true"
        elif not equals:
            raise UserError(f"--{name} needs a value, got none: write --{name} VALUE")
        if name == "config":
            files.append(value)
        elif name != "local_rank":  # the deepspeed launcher appends it; LOCAL_RANK has the same value
            overrides.append(Layer(nested({name: _value(name, value, hints)})))
    return files, overrides, wants_help


def _is_known(config_type: type, name: str) -> bool:
    section, _, last = name.rpartition(".")
    return bool(find_hints(config_type, name)) or (last == "name" and bool(find_hints(config_type, section)))


def _value(name: str, text: str, hints: list[Any]) -> Any:
    """The value of an override: a list or a section is YAML; any other is read by the type of its key."""
    is_section = any(dataclasses.is_dataclass(hint) for hint in hints)
    if is_section and re.fullmatch(r"\w+", text) and text not in ("null", "true", "false"):
        return text  # an algorithm's name
    takes_list = any(is_list(hint) for hint in hints)
    if not (is_section or takes_list):
        return text
    return parse_yaml(f"value: {_as_list(text) if takes_list else text}", f"--{name}")["value"]


def _as_list(value: str) -> str:
    """A bare word, or one mapping, for a list stands for a list of one."""
    if value.lstrip().startswith("{"):
        return f"[{value}]"
    return value if value.lstrip().startswith("[") or value == "null" else json.dumps([value])


def _read_file(file: str) -> dict[str, Any]:
    """The content of a config file; refuses one that is missing or is not YAML."""
    return parse_yaml(read_text(file, "--config must name a file"), file)


def _describe(report: str, keys: Mapping[str, Key]) -> str:
    """The parser's report of a wrong value in one line: the key, its type, the value."""
    key = re.search(r'Parser key "([\w.]+)"', report)
    values = re.findall(r"(?:Got|Given) value: (.*)", report)
    if key and key[1] in keys and values:
        return f"{key[1]} must be {type_name(keys[key[1]].hint)}, got {values[-1]}: see --help"
    if key and key[1] in keys and "Exceeds the limit" in report:
        return f"{key[1]} must be {type_name(keys[key[1]].hint)}, got a number of thousands of digits: see --help"
    rule = re.search(r"^ *- (?!Expected|Problem|Not a valid)(.*)", report, re.MULTILINE)
    return rule[1] if rule else f"{' '.join(report.split())}: see --help"
