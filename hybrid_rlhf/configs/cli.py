"""The command line: YAML files and dotted overrides to a frozen config, and back. The only user of
jsonargparse.

Files come first and overrides over them, wherever they stand on the line. What a user gets wrong is one line on
stderr and exit code 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import json
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from hybrid_rlhf.configs.errors import UserError

ConfigT = TypeVar("ConfigT")
set_parsing_settings(docstring_parse_attribute_docstrings=True)


def parse_config(
    config_type: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    defaults: Path | None = None,
    positional: str | None = None,
) -> ConfigT:
    """A config from `--config FILE.yaml` and dotted overrides such as `--optimizer.lr 1e-5`.

    Args:
        config_type: a dataclass of configs/.
        argv: the words of the line; none: the process's own.
        prog: the name that --help shows.
        defaults: a YAML that lies under the user's files.
        positional: a key that the first bare word of the line may give.

    Raises:
        UserError: for an unknown key, a wrong value, a file that cannot be read, or a rule of the config.
        SystemExit: after --help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if positional is not None and words and not words[0].startswith("-"):
        words[0] = f"--{positional}={words[0]}"
    keys = dotted_keys(config_type)
    files, overrides = _sort_words(words, keys)
    if defaults is not None:
        files.insert(0, str(defaults))
    for file in files:
        _check_file(file, keys)
    parser = _parser(config_type, prog)
    try:
        parsed = parser.parse_args([word for file in files for word in ("--config", file)] + overrides)
        sections = parser.instantiate(parsed)
    except ArgumentError as error:
        raise UserError(_one_line(error)) from error
    values = {field.name: sections[field.name] for field in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    return config_type(**values)


def read_config(config: Any) -> dict[str, Any]:
    """A config, or the file that save_config wrote, as dotted keys and plain values."""
    content = yaml.safe_load(config.read_text()) if isinstance(config, Path) else _plain(config)
    return _flat(content)


def save_config(config: Any, path: Path) -> None:
    """Write a config as the YAML that parse_config reads back to an equal one; beside and renamed."""
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text(yaml.safe_dump(_plain(config), sort_keys=False))
    os.replace(beside, path)


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
    content: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return content


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in content.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a user's mistake, or a full disk, into one line on stderr and exit code 2."""
    try:
        yield
    except UserError as error:
        _stop(str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _stop(f"no space left on the device of {error.filename or 'the output folder'}: free some and resume")


def _stop(message: str) -> NoReturn:
    # Every rank meets the same mistake; one a host tells it.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def _parser(config_type: Any, prog: str | None) -> ArgumentParser:
    parser = ArgumentParser(prog=prog, exit_on_error=False, usage="%(prog)s [--config FILE.yaml] [--KEY VALUE ...]")
    parser.add_argument("--config", action="config", help="YAML file of keys; may be given more than once")
    parser.add_class_arguments(config_type)
    parser.description = (config_type.__doc__ or "").strip()
    return parser


def _sort_words(words: list[str], keys: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The config files, and the overrides as `--key=value`; unknown keys are refused."""
    files: list[str] = []
    overrides: list[str] = []
    sections = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if word in ("-h", "--help"):
            overrides.append(word)
            continue
        if not word.startswith("--"):
            raise UserError(f"options start with --, got {word!r}: write --KEY VALUE, see --help")
        if name not in keys and name not in sections and name not in ("config", "local_rank"):
            raise UserError(f"unknown option --{name}: {_nearest(name, keys)}")
        if not equals:
            following = next(rest, None)
            if following is None:
                raise UserError(f"--{name} needs a value, got none: write --{name} VALUE")
            value = following
        if name == "config":
            files.append(value)
        elif name != "local_rank":  # the deepspeed launcher appends it; LOCAL_RANK says the same
            overrides.append(f"--{name}={_as_list(value) if _is_list(keys.get(name)) else value}")
    return files, overrides


def _is_list(hint: Any) -> bool:
    options = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    return str not in options and any(typing.get_origin(option) is list for option in options)


def _as_list(value: str) -> str:
    """A bare word for a list stands for a list of one."""
    return value if value.lstrip().startswith("[") or value in ("null", "None") else json.dumps([value])


def _check_file(file: str, keys: Mapping[str, Any]) -> None:
    """Refuse a config file that is missing, is not YAML, or has a key that no config has."""
    try:
        content = yaml.safe_load(Path(file).read_text())
    except FileNotFoundError as error:
        raise UserError(f"--config must name a file, {file} does not exist: check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config must name a text file, {file} cannot be read ({error}): check it") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{file}:{line}: not YAML ({error.problem}): mend the line") from error
    if content is not None and not isinstance(content, dict):
        raise UserError(
            f"{file}: a config is a mapping of keys, got a {type(content).__name__}: write KEY: VALUE lines"
        )
    for key in _leaves(content or {}, keys):
        if key not in keys:
            raise UserError(f"{file}: unknown key {key}: {_nearest(key, keys)}")


def _leaves(content: Mapping[str, Any], keys: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in keys and any(known.startswith(f"{key}.") for known in keys):
            yield from _leaves(value, keys, f"{key}.")
        elif not any(known.startswith(f"{key}.") for known in keys):
            yield key


def _nearest(wrong: str, keys: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(wrong, keys, n=1, cutoff=0.0)
    same_leaf = [key for key in keys if key.rsplit(".", 1)[-1] == wrong.rsplit(".", 1)[-1]]
    best = difflib.get_close_matches(wrong, same_leaf, n=1, cutoff=0.0) or close
    return f"the nearest is {best[0]}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace("Parser key ", "").replace("<class '", "").replace("'>", "")
    return f"{text}; see --help" if "see --help" not in text else text
