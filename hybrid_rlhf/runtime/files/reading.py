"""Files and folders that a user names, and JSON in them: read whole, or refused in one line.

Why one place: a path may be a pipe that nobody writes to, a device without an end, or bytes that are no text; a parser
may be nested out of its stack, and takes the last of two equal keys in silence.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.errors import UserError

CACHE = "~/.cache/hybrid_rlhf"
"""Folder of what is computed or downloaded once per machine: tokenized rows, dequantised models, measured choices."""
_MAGIC = {
    b"\x1f\x8b": "is compressed with gzip: gunzip it",
    b"PK\x03\x04": "is a zip archive: unzip it",
    b"\xff\xfe": "is UTF-16: save it as UTF-8",
    b"\xfe\xff": "is UTF-16: save it as UTF-8",
}


class NotJSON(ValueError):
    """What is wrong with a text, and where."""

    def __init__(self, reason: str, line: int = 1, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.line, self.column = reason, line, column


def user_path(path: str | Path) -> Path:
    """A path that a user wrote; ~ is the home folder, and the ~name of nobody is a name, as for a shell."""
    return Path(os.path.expanduser(path))


def cache_folder(cache_dir: str | None = None) -> Path:
    """The folder that a setting names; None: ~/.cache/hybrid_rlhf."""
    return user_path(cache_dir or CACHE)


def regular_file(path: str | Path, rule: str) -> Path:
    """The path of a file that has an end.

    Args:
        path: what the user wrote; ~ is the home folder.
        rule: what it must be, the beginning of an error: "--config must name a file".

    Raises:
        UserError: when it is missing, a folder, a pipe or a device, or cannot be looked at.
    """
    try:
        file = Path(path).expanduser()
        if file.is_file():
            return file
        exists, folder = file.exists(), file.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~ of a user that there is not
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UserError(f"{rule}, {path} cannot be read ({reason}): check the path") from error
    kind = "is a folder" if folder else "is a pipe or a device" if exists else "does not exist"
    raise UserError(f"{rule}, {path} {kind}: check the path")


def read_text(path: str | Path, rule: str) -> str:
    """The text of a file, UTF-8 with or without its mark.

    Raises:
        UserError: when there is no such file or it is no text; see `regular_file`.
    """
    file = regular_file(path, rule)
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_text(file) from error
    except OSError as error:
        raise UserError(f"{rule}, {path} cannot be read ({error.strerror}): check the path") from error


def not_text(file: Path) -> UserError:
    """The error for bytes that are not UTF-8."""
    with file.open("rb") as opened:
        start = opened.read(4)
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "is not UTF-8 text: convert it")
    return UserError(f"{file} {kind}")


def parse_json(text: str) -> Any:
    """JSON in which no key is repeated and all text can be written as UTF-8.

    Raises:
        NotJSON: for whatever else.
    """
    try:
        content = json.loads(text, object_pairs_hook=_distinct)
        if "\\ud" in text.lower():  # \ud83d alone is half of a character
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except json.JSONDecodeError as error:
        page = text.lstrip()[:1] == "<"
        reason = "it is a page of HTML or XML" if page else error.msg
        raise NotJSON(reason, error.lineno, None if page else error.colno) from error
    except RecursionError as error:
        raise NotJSON("it is nested too deeply") from error
    except NotJSON:
        raise
    except UnicodeEncodeError as error:
        raise NotJSON("a text has half of a surrogate pair") from error
    except ValueError as error:  # Python's guard against numbers that take hours to read
        raise NotJSON(f"a number has more than {sys.get_int_max_str_digits()} digits") from error


def read_json_object(path: str | Path, key: str) -> dict[str, Any]:
    """The object of a JSON file that a config key names.

    Raises:
        UserError: when there is no such file, or it holds something else.
    """
    text = read_text(path, f"{key} must name a JSON file")
    try:
        content = parse_json(text)
    except NotJSON as error:
        raise UserError(f"{key} must be JSON, {path}:{error.line} is not ({error.reason}): fix it") from error
    if not isinstance(content, dict):
        raise UserError(f"{key} must be a JSON object, {path} holds a {type(content).__name__}: fix it")
    return content


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose reader would take the last of two equal keys in silence."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise NotJSON(f"a key is given once, {double!r} is repeated")
    return content
