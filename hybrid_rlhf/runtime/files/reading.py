"""Files and folders that a user names, and JSON in them: read completely, or refused in one line.

A path may be a pipe without a writer, an endless device, or bytes that are not text; deeply nested JSON may overflow
the parser's stack, and a parser silently takes the last of two equal keys.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from hybrid_rlhf.configs.errors import UserError

CACHE = "~/.cache/hybrid_rlhf"
"""Folder of results that are computed or downloaded once per machine: tokenized rows, models, measured choices."""
_MAGIC = {
    b"\x1f\x8b": "is compressed with gzip: gunzip it",
    b"PK\x03\x04": "is a zip archive: unzip it",
    b"\xff\xfe": "is UTF-16: save it as UTF-8",
    b"\xfe\xff": "is UTF-16: save it as UTF-8",
}


class NotJSON(ValueError):
    """A text is not valid JSON; with the reason and its position."""

    def __init__(self, reason: str, line: int = 1, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line
        self.column = column


def user_path(path: str | Path) -> Path:
    """Expand ~ in a path of the user; ~name of an unknown user is kept, as in a shell."""
    return Path(os.path.expanduser(path))


def cache_folder(cache_dir: str | None = None) -> Path:
    """The folder that a setting names; None: ~/.cache/hybrid_rlhf."""
    return user_path(cache_dir or CACHE)


def regular_file(path: str | Path, rule: str) -> Path:
    """The path of a regular file.

    Args:
        path: path as the user wrote it; ~ is the home folder.
        rule: requirement at the beginning of an error, such as "--config must name a file".

    Raises:
        UserError: when it is missing, a folder, a pipe or a device, or cannot be accessed.
    """
    try:
        file = Path(path).expanduser()
        if file.is_file():
            return file
        exists = file.exists()
        folder = file.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~ of an unknown user
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UserError(f"{rule}, {path} cannot be read ({reason}): check the path") from error
    kind = "is a folder" if folder else "is a pipe or a device" if exists else "does not exist"
    raise UserError(f"{rule}, {path} {kind}: check the path")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a link could lead out of the folder, and a pipe would block.

    Raises:
        OSError: if it does not exist, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: str | Path, rule: str) -> str:
    """The text of a file, UTF-8 with or without a byte order mark.

    Raises:
        UserError: when there is no such file or it is not text; see `regular_file`.
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
        NotJSON: for any other text.
    """
    try:
        content = json.loads(text, object_pairs_hook=_distinct)
        if "\\ud" in text.lower():  # a lone surrogate such as \ud83d is half of a character
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except json.JSONDecodeError as error:
        page = text.lstrip()[:1] == "<"
        reason = "it is a page of HTML or XML" if page else error.msg.removesuffix(" at")
        raise NotJSON(reason, error.lineno, None if page else error.colno) from error
    except RecursionError as error:
        raise NotJSON("it is nested too deeply") from error
    except NotJSON:
        raise
    except UnicodeEncodeError as error:
        raise NotJSON("a text has half of a surrogate pair") from error
    except ValueError as error:  # Python's limit on the digits of integers
        raise NotJSON(f"a number has more than {sys.get_int_max_str_digits()} digits") from error


def read_json_object(path: str | Path, key: str) -> dict[str, Any]:
    """The object of a JSON file that a config key names.

    Raises:
        UserError: when there is no such file, or it does not contain an object.
    """
    text = read_text(path, f"{key} must name a JSON file")
    try:
        content = parse_json(text)
    except NotJSON as error:
        raise UserError(f"{key} must be JSON, {path}:{error.line} is not ({error.reason}): fix it") from error
    if not isinstance(content, dict):
        raise UserError(f"{key} must be a JSON object, {path} holds a {type(content).__name__}: fix it")
    return content


def stored_object(file: Path) -> dict[str, Any]:
    """The object of a JSON file that a run has written; {} if the file is missing or has other content."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raise NotJSON for a repeated key, of which the parser would silently take the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        [(double, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise NotJSON(f"a key is given once, {double!r} is repeated")
    return content
