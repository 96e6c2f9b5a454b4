"""Files of a run folder, which may be anything: a folder is copied from elsewhere, half written, or no run at all."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.yaml_text import parse_yaml

CHUNK_BYTES = 2**20
LONGEST_LINE = 64 * 2**20
"""In bytes. A rollout's text is a thousandth of it; beyond, a file is no JSON Lines file."""
_LONGEST_CONFIG = 2**20


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a link could lead out of the folder, and a pipe would block.

    Raises:
        OSError: if there is none, or it is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def file_size(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def file_problem(path: Path) -> str | None:
    """Why the board does not open something in a run folder; None: it is a regular file, or missing."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        return f"{path.name} is a link, and links are not followed: put the file itself there"
    return None if stat.S_ISREG(mode) else f"{path.name} is no regular file"


def complete_lines(file: BinaryIO, offset: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[list[tuple[int, bytes]]]:
    """Lines from an offset on with their offsets, a chunk at a time, without a last one that has no end yet.

    Raises:
        ValueError: for a line that is longer than any of a run.
    """
    file.seek(offset)
    rest = b""
    while chunk := file.read(chunk_bytes):
        end = chunk.rfind(b"\n") + 1
        if not end:
            rest += chunk
            if len(rest) > LONGEST_LINE:
                raise ValueError(f"the line at byte {offset} is longer than {LONGEST_LINE} bytes")
            continue
        lines = []
        for line in (rest + chunk[:end]).split(b"\n")[:-1]:
            lines.append((offset, line))
            offset += len(line) + 1
        rest = chunk[end:]
        yield lines


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line with a step; None: it is something else."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not is_count(content.get("step")):
        return None
    return content


def last_line(path: Path) -> dict[str, Any] | None:
    """The last complete line of a file; None: it has none, or it is no JSON with a step.

    Raises:
        OSError: if it cannot be read.
    """
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - 2**20)
        file.seek(start)
        lines = file.read(size - start).split(b"\n")[:-1]
    return parsed(lines[-1]) if lines else None


def read_run_config(path: Path) -> dict[str, Any]:
    """The nested settings of a config.yaml.

    Raises:
        OSError: if it cannot be read.
        UserError: if it is not a mapping.
    """
    with open_regular(path) as file:
        content = file.read(_LONGEST_CONFIG + 1)
    if len(content) > _LONGEST_CONFIG:
        raise UserError(f"{path.name} has more than {_LONGEST_CONFIG} bytes: it is no config of a run")
    try:
        return parse_yaml(content.decode(), path.name)
    except UnicodeDecodeError:
        raise UserError(f"{path.name} is not UTF-8 text: restore it") from None


def is_count(value: Any) -> bool:
    """Whether a value is a whole number that a step, index or length may be."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def number(value: Any) -> float:
    """A value as a number; NaN for null and anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def finite(value: float) -> float | None:
    """A number as JSON has it."""
    return float(value) if math.isfinite(value) else None
