"""Reads files of a run folder that may be copied, incomplete, or not from a run at all."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.yaml_text import parse_yaml
from hybrid_rlhf.runtime.files.reading import open_regular

CHUNK_BYTES = 2**20
LONGEST_LINE = 64 * 2**20
"""Limit in bytes: a thousand times a rollout's text; a file with a longer line is not a JSON Lines file."""
_LONGEST_CONFIG = 2**20


def file_size(path: Path) -> int:
    """Size of a file in bytes; -1 if it does not exist."""
    try:
        status = path.lstat()
    except OSError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def file_problem(path: Path) -> str | None:
    """Why the board does not open a file of a run folder; None if it is a regular file, or missing."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        return f"{path.name} is a link, and links are not followed: put the file itself there"
    return None if stat.S_ISREG(mode) else f"{path.name} is no regular file"


def complete_lines(file: BinaryIO, offset: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[list[tuple[int, bytes]]]:
    """Lines from an offset on, with their offsets, a chunk at a time, without an incomplete last line.

    Raises:
        ValueError: for a line that is longer than any line of a run.
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
    """The content of a line with a step; None for anything else."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not is_count(content.get("step")):
        return None
    return content


def last_line(path: Path) -> dict[str, Any] | None:
    """The last complete line of a file; None if there is none, or if it is not JSON with a step.

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
    """Return True if a value is a valid step, index or length."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def number(value: Any) -> float:
    """A value as a number; NaN for null and other types."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def finite(value: float) -> float | None:
    """A number for JSON; None if it is not finite."""
    return float(value) if math.isfinite(value) else None
