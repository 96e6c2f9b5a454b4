"""JSON Lines files to which a run appends. A failing disk does not end the run.

Lines that cannot be written stay in memory, in order, until the disk accepts them; a partial line is truncated.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.observability.logs import logger

MAX_PENDING_BYTES = 64 * 2**20
"""Limit of the pending lines; beyond it the oldest are discarded."""


class JsonLinesFile:
    """Appends lines to a file and raises no disk errors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._complete_bytes = 0
        """Size of the file up to its last complete line."""
        self._pending: deque[bytes] = deque()
        self._pending_bytes = self._lost = 0
        self._is_failing = self._has_failed_flush = False

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write lines after the pending ones; the log names a disk error when it begins and when it ends."""
        for line in lines:
            text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
            self._pending.append(text.encode(errors="backslashreplace"))  # a lone surrogate cannot be encoded
            self._pending_bytes += len(self._pending[-1])
        while self._pending_bytes > MAX_PENDING_BYTES:
            self._pending_bytes -= len(self._pending.popleft())
            self._lost += 1
        self._write()

    def flush(self) -> None:
        """Flush the lines to disk."""
        self._write()
        try:
            if self._file is not None:
                os.fsync(self._file)
        except OSError as error:
            if not self._has_failed_flush:
                logger.warning("%s cannot be flushed to disk (%s): a crash may lose lines", self._path, error.strerror)
            self._has_failed_flush = True

    def close(self) -> None:
        """Write pending lines, if the disk accepts them now, and close the file."""
        self._write()
        if self._pending:
            logger.warning("%s lacks its last %d lines, which could not be written", self._path, len(self._pending))
        self._close()

    def _write(self) -> None:
        try:
            if self._pending:
                self._write_pending()
        except OSError as error:
            if not self._is_failing:
                reason = error.strerror or type(error).__name__
                logger.warning("%s cannot be written (%s): its lines are kept in memory", self._path, reason)
            self._is_failing = True
            with contextlib.suppress(OSError):  # repeated before the next write
                if self._file is not None:
                    os.ftruncate(self._file, self._complete_bytes)
            self._close()
            return
        if self._is_failing:
            lost = f", {self._lost} lines are lost" if self._lost else ""
            logger.warning("%s can be written again%s", self._path, lost)
            self._is_failing = False
            self._lost = 0

    def _write_pending(self) -> None:
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            self._close()  # the file has been removed: create a new one
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            size = os.fstat(self._file).st_size
            self._complete_bytes = min(size, self._complete_bytes) if self._is_failing else size
        if self._is_failing:
            os.ftruncate(self._file, self._complete_bytes)
        content = memoryview(b"".join(self._pending))
        while content:
            content = content[os.write(self._file, content) :]
        self._complete_bytes = os.fstat(self._file).st_size
        self._pending.clear()
        self._pending_bytes = 0

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # write has already reported any error
                os.close(self._file)
            self._file = None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, each with a `step`, up to the first that is incomplete."""
    return [line for line, _ in _parsed(path)]


def drop_lines_after(path: Path, step: int) -> None:
    """Keep only the complete lines up to a step: a resumed run writes the later ones again.

    Raises:
        OSError: if the file cannot be read or written; it is then unchanged.
    """
    if not path.exists():
        return
    complete = b"".join(raw + b"\n" for line, raw in _parsed(path) if line["step"] <= step)
    if complete != path.read_bytes():
        write_whole(path, complete)


def _parsed(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    if not path.exists():
        return []
    lines = []
    for raw in path.read_bytes().splitlines():
        try:
            line = json.loads(raw)
        except ValueError:
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append((line, raw))
    return lines
