"""Lines of JSON, appended to a file through a run. A disk that fails does not end a run that is worth more than them.

A line that cannot be written waits in memory, in its order, until the disk takes it; a half line never stays.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.whole_files import write_whole
from hybrid_rlhf.runtime.logs import LOGGER_NAME

MOST_WAITING_BYTES = 64 * 2**20
"""Of lines in memory; the oldest go first."""
logger = logging.getLogger(LOGGER_NAME)


class LineFile:
    """Appends lines to a file, and never raises for want of a disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._whole_bytes = 0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._lost = 0
        self._fails = self._unsafe = False

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write lines, after those that wait; once a fault begins and once it ends, the log says so."""
        for line in lines:
            text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
            self._waiting.append(text.encode(errors="backslashreplace"))  # half a surrogate pair is no UTF-8
            self._waiting_bytes += len(self._waiting[-1])
        while self._waiting_bytes > MOST_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._lost += 1
        with self._faults_told():
            self._write()

    def flush(self) -> None:
        """Bring the lines to the disk itself."""
        with self._faults_told():
            self._write()
        try:
            if self._file is not None:
                os.fsync(self._file)
        except OSError as error:
            if not self._unsafe:
                logger.warning("%s may not be on its disk, which refuses (%s)", self._path, error.strerror)
            self._unsafe = True

    def close(self) -> None:
        """Write what waits, if the disk takes it now, and close the file."""
        with self._faults_told():
            self._write()
        if self._waiting:
            logger.warning("%s lacks its last %d lines, which could not be written", self._path, len(self._waiting))
        self._close()

    def _write(self) -> None:
        if not self._waiting:
            return
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            self._close()  # removed by someone: a new one is begun
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            size = os.fstat(self._file).st_size
            self._whole_bytes = min(size, self._whole_bytes) if self._fails else size
        if self._fails:
            os.ftruncate(self._file, self._whole_bytes)
        content = memoryview(b"".join(self._waiting))
        while content:
            content = content[os.write(self._file, content) :]
        self._whole_bytes = os.fstat(self._file).st_size
        self._waiting.clear()
        self._waiting_bytes = 0

    @contextlib.contextmanager
    def _faults_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._fails:
                reason = error.strerror or type(error).__name__
                logger.warning("%s cannot be written (%s): its lines wait in memory until it can", self._path, reason)
            self._fails = True
            with contextlib.suppress(OSError):  # tried again before the next write
                if self._file is not None:
                    os.ftruncate(self._file, self._whole_bytes)
            self._close()
            return
        if self._fails:
            lost = f", {self._lost} lines of it are lost" if self._lost else ""
            logger.warning("%s is written again%s", self._path, lost)
            self._fails, self._lost = False, 0

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what close could tell, write has told
                os.close(self._file)
            self._file = None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, each with a `step`; a last one that was cut off, and whatever is after it, is left out."""
    return [line for line, _ in _parsed(path)]


def drop_lines_past(path: Path, step: int) -> None:
    """Leave only the whole lines up to a step: what a run that was cut off wrote after it, a resumed one writes anew.

    Raises:
        OSError: when the file cannot be read or written; it is then as it was.
    """
    if not path.exists():
        return
    kept = b"".join(raw + b"\n" for line, raw in _parsed(path) if line["step"] <= step)
    if kept != path.read_bytes():
        write_whole(path, kept)


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
