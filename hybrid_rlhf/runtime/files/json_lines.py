"""JSON Lines files to which a run appends. A failing disk does not end the run.

Lines that cannot be written stay in memory, in order, until the disk accepts them; a partial line is truncated.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.durable import flush
from hybrid_rlhf.runtime.observability.logs import logger

MAX_PENDING_BYTES = 64 * 2**20
"""Limit of the pending lines; beyond it the oldest are discarded."""


class JsonLinesFile:
    """Appends lines to a file and raises no disk errors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._complete_bytes: int | None = None
        """Size of the file up to its last complete line, if a partial one may follow."""
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
            if self._path.exists():
                flush(self._path)
        except OSError as error:
            if not self._has_failed_flush:
                logger.warning("%s cannot be flushed to disk (%s): a crash may lose lines", self._path, error.strerror)
            self._has_failed_flush = True

    def close(self) -> None:
        """Write pending lines, if the disk accepts them now."""
        self._write()
        if self._pending:
            logger.warning("%s lacks its last %d lines, which could not be written", self._path, len(self._pending))

    def _write(self) -> None:
        if not self._pending:
            return
        try:
            self._write_pending()
        except OSError as error:
            if not self._is_failing:
                reason = error.strerror or type(error).__name__
                logger.warning("%s cannot be written (%s): its lines are kept in memory", self._path, reason)
            self._is_failing = True
            return
        if self._is_failing:
            lost = f", {self._lost} lines are lost" if self._lost else ""
            logger.warning("%s can be written again%s", self._path, lost)
            self._is_failing = False
            self._lost = 0

    def _write_pending(self) -> None:
        with self._path.open("ab", buffering=0) as file:  # opened each time: the file may have been removed
            if self._complete_bytes is not None:
                file.truncate(min(self._complete_bytes, file.tell()))
            self._complete_bytes = file.seek(0, os.SEEK_END)
            content = memoryview(b"".join(self._pending))
            try:
                while content:
                    content = content[file.write(content) :]
            except OSError:
                with contextlib.suppress(OSError):  # repeated before the next write
                    file.truncate(self._complete_bytes)
                raise
        self._complete_bytes = None
        self._pending.clear()
        self._pending_bytes = 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, each with a `step`, up to the first that is incomplete; [] without the file."""
    return [line for line, _ in parse_lines(path.read_bytes())] if path.exists() else []


def drop_lines_after(path: Path, step: int) -> None:
    """Keep only the complete lines up to a step: a resumed run writes the later ones again.

    Raises:
        OSError: if the file cannot be read or written; it is then unchanged.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    complete = b"".join(raw + b"\n" for line, raw in parse_lines(content) if line["step"] <= step)
    if complete != content:
        write_whole(path, complete)


def parse_lines(content: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Objects with a `step` and their lines, up to the first line that is none."""
    for raw in content.splitlines():
        try:
            line = json.loads(raw)
        except ValueError:
            return
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            return
        yield line, raw
