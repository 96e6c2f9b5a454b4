"""An index of samples.jsonl: columns of numbers for filters, the place of each line, and a text search.

`samples.index/` lies beside samples.jsonl, or in the cache folder where the run folder cannot be written. It has one
folder per generation with a file per column, and `state.json`, written last and at once, which says how many rows
count. An index that does not fit its file is left for a new generation, so that a reader's mapped files stay as they
are; it can be removed at any time. One board at a time writes; others read what it has written.

Why columns and not tables of SQLite: counting what a filter leaves of ten million rows takes SQLite seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.board.runs.folders import RunFolder
from hybrid_rlhf.board.runs.reading import complete_lines, file_size, is_count, number, open_regular, parsed
from hybrid_rlhf.board.samples.texts import TextIndex
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files.atomic import write_whole
from hybrid_rlhf.configs.files.cache import cache_folder
from hybrid_rlhf.runtime.files.names import SAMPLES_FILE

INDEX_FOLDER = "samples.index"
_FORMAT = 1
_STATE = "state.json"
_MOST_COMPONENTS = 64
_COLUMNS = {
    "offset": "<i8",
    "prompt": "<i8",
    "step": "<i4",
    "index": "<i4",
    "group": "<i4",
    "score": "<f4",
    "kl": "<f4",
    "length": "<f4",
}
"""File format of each column; a missing number is NaN, a missing group -1. Components have one more each."""


@dataclass(frozen=True)
class IndexState:
    """What of an index counts."""

    format: int = _FORMAT
    generation: str = ""
    rows: int = 0
    end: int = 0
    """Byte of samples.jsonl up to which it is indexed."""
    last: int = 0
    """Byte at which the last indexed line begins."""
    last_crc: int = 0
    components: tuple[str, ...] = ()
    skipped: int = 0
    """Lines that are no samples."""
    step: int = -1
    position: int = 0
    """The next position in that step, for rows without an index."""


@dataclass
class _Lines:
    """Rows on their way into the columns."""

    state: IndexState
    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    components: list[dict[str, float]] = field(default_factory=list)
    texts: list[tuple[int, str, int, str]] = field(default_factory=list)
    """Row, completion, prompt, text of the prompt."""


@dataclass(frozen=True)
class IndexView:
    """The rows that an index had at one time."""

    state: IndexState
    folder: Path
    texts: TextIndex | None
    """None: there are no rows."""

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.state.rows

    def column(self, name: str) -> NDArray[Any]:
        """A column, mapped from its file; of a component as `component/NAME`.

        Raises:
            FileNotFoundError: if the index has begun a new generation.
        """
        kind = np.dtype(_COLUMNS.get(name, "<f4"))
        if not self.rows:
            return np.empty(0, kind)
        return np.memmap(_column_file(self.folder, self.state, name), kind, mode="r", shape=(self.rows,))


class SampleIndex:
    """The index of one run; may be used by several threads."""

    def __init__(self, run: RunFolder) -> None:
        """Take the run; nothing is read before `update`."""
        self.samples = run.folder / SAMPLES_FILE
        self._folder, self._removed_at_exit = _index_folder(run)
        self._lock = threading.Lock()
        self._state, self._stamp = IndexState(), 0
        self._is_checked = False
        """Whether the text search of an earlier board was looked at."""
        self._writing: TextIndex | None = None
        self._searching: TextIndex | None = None
        self._search_lock = threading.Lock()

    @property
    def progress(self) -> float:
        """Which part of samples.jsonl is indexed."""
        size = file_size(self.samples)
        return 1.0 if size <= 0 else min(self._state.end / size, 1.0)

    def update(self, seconds: float) -> bool:
        """Index new lines for about so many seconds; whether there are more.

        Raises:
            OSError: if the samples cannot be read, or the index cannot be written.
        """
        if not self._lock.acquire(blocking=False):
            return True  # another thread is indexing
        try:
            self._load()
            if self._is_checked and file_size(self.samples) == self._state.end and self._continues():
                return False
            with self._writer() as is_writer:
                return self._read_on(time.monotonic() + seconds) if is_writer else True
        finally:
            self._lock.release()

    def _read_on(self, deadline: float) -> bool:
        self._load()  # another board may have written before this one could
        if not self._state.generation or not self._continues() or not self._has_texts():
            self._begin_generation()
        self._is_checked = True
        try:
            with open_regular(self.samples) as file:
                for lines in complete_lines(file, self._state.end):
                    self._append(lines)
                    if time.monotonic() > deadline:
                        return True
        except (FileNotFoundError, ValueError):  # none yet; a line without an end, so no samples.jsonl
            pass
        return False

    def view(self) -> IndexView:
        """What is indexed now."""
        state = self._state
        with self._search_lock:
            if self._searching is None or self._searching.generation != state.generation:
                if self._searching is not None:
                    self._searching.close()
                self._searching = TextIndex.at(self._folder, state.generation) if state.generation else None
            return IndexView(state, self._folder, self._searching)

    def close(self) -> None:
        """Close the files; a temporary index is removed."""
        with self._lock:
            for texts in (self._writing, self._searching):
                if texts is not None:
                    texts.close()
            self._writing = self._searching = None
            if self._removed_at_exit:
                shutil.rmtree(self._folder, ignore_errors=True)

    def lines(self, view: IndexView, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Rows of samples.jsonl.

        Raises:
            OSError: if it cannot be read.
            UserError: if it is no longer what was indexed.
        """
        if not len(rows):
            return []
        found = []
        offsets = view.column("offset")[rows].tolist()
        with open_regular(self.samples) as file:
            for offset in offsets:
                file.seek(offset)
                content = parsed(file.readline())
                if content is None or "completion" not in content:
                    raise UserError(f"{SAMPLES_FILE} has changed since it was indexed: ask again")
                found.append(content)
        return found

    def line(self, view: IndexView, row: int) -> dict[str, Any]:
        """One row; see `lines`."""
        return self.lines(view, np.array([row]))[0]

    def _load(self) -> None:
        """The state on the disk, which another board may have written."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            file = self._folder / _STATE
            stamp = file.stat().st_mtime_ns
            if stamp == self._stamp:
                return
            content = json.loads(file.read_text())
            if content.get("format") == _FORMAT and all(
                (self._folder / content["generation"] / f"{name}.bin").exists() for name in _COLUMNS
            ):
                self._state = IndexState(**{**content, "components": tuple(content["components"])})
                self._stamp = stamp

    def _continues(self) -> bool:
        """Whether the last indexed line is still in its place."""
        state = self._state
        if not state.rows:
            return state.end <= max(file_size(self.samples), 0)
        try:
            with open_regular(self.samples) as file:
                file.seek(state.last)
                return zlib.crc32(file.readline().removesuffix(b"\n")) == state.last_crc
        except OSError:
            return False

    @contextlib.contextmanager
    def _writer(self) -> Iterator[bool]:
        """Whether this board may write the index."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:  # a file system without locks: boards on it write in turn by chance, as runs do
                pass
            yield True

    def _begin_generation(self) -> None:
        if self._writing is not None:
            self._writing.close()
            self._writing = None
        state = IndexState(generation=uuid.uuid4().hex[:12])
        (self._folder / state.generation).mkdir()
        for name in _COLUMNS:
            _column_file(self._folder, state, name).touch()
        self._commit(state)
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder.name != state.generation:
                shutil.rmtree(folder, ignore_errors=True)

    def _commit(self, state: IndexState) -> None:
        write_whole(self._folder / _STATE, json.dumps(dataclasses.asdict(state)))
        self._state, self._stamp = state, (self._folder / _STATE).stat().st_mtime_ns

    def _open_texts(self) -> TextIndex:
        if self._writing is None or self._writing.generation != self._state.generation:
            if self._writing is not None:
                self._writing.close()
            self._writing = TextIndex.at(self._folder, self._state.generation)
        return self._writing

    def _has_texts(self) -> bool:
        """Whether the text search has all rows and can be read."""
        try:
            return self._open_texts().rows() == self._state.rows
        except sqlite3.DatabaseError:
            return False

    def _append(self, lines: list[tuple[int, bytes]]) -> None:
        """Index lines: texts first and not committed, then columns and state, then the texts' end."""
        new = _Lines(self._state)
        for offset, line in lines:
            _read_line(new, offset, line)
        offset, line = lines[-1]
        rows = new.state.rows + len(new.columns["offset"])
        state = dataclasses.replace(
            new.state, rows=rows, end=offset + len(line) + 1, last=offset, last_crc=zlib.crc32(line)
        )
        before = self._state.rows
        with self._open_texts().adding(before, new.texts):
            for name, values in new.columns.items():
                self._write_column(state, name, before, np.array(values, _COLUMNS[name]))
            for name in state.components:
                column = np.array([row.get(name, np.nan) for row in new.components], "<f4")
                self._write_column(state, f"component/{name}", before, column)
            self._commit(state)

    def _write_column(self, state: IndexState, name: str, before: int, values: NDArray[Any]) -> None:
        """Append to a column, over what an earlier board wrote without bringing it to its end."""
        file = _column_file(self._folder, state, name)
        with file.open("r+b" if file.exists() else "w+b") as opened:
            size = before * values.itemsize
            if opened.seek(0, os.SEEK_END) < size:  # a component that appears late
                missing = before - opened.tell() // values.itemsize
                opened.write(np.full(missing, np.nan, values.dtype).tobytes())
            opened.seek(size)
            opened.write(values.tobytes())
            opened.truncate()


def _column_file(folder: Path, state: IndexState, name: str) -> Path:
    if name.startswith("component/"):
        name = f"component_{state.components.index(name.removeprefix('component/'))}"
    return folder / state.generation / f"{name}.bin"


def prompt_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a row as messages."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return [
            message if isinstance(message, dict) else {"role": "user", "content": str(message)} for message in prompt
        ]
    return [{"role": "user", "content": "" if prompt is None else str(prompt)}]


def prompt_text(row: dict[str, Any]) -> str:
    """What the last message of a row's prompt says."""
    messages = prompt_messages(row)
    return str(messages[-1].get("content") or "") if messages else ""


def prompt_number(messages: list[dict[str, Any]]) -> int:
    """A hash of messages that is the same in all runs, as a signed number of 64 bits."""
    text = json.dumps(messages, sort_keys=True, ensure_ascii=False)
    digest = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _read_line(new: _Lines, offset: int, line: bytes) -> None:
    row, state = parsed(line), new.state
    if row is None or "completion" not in row:
        new.state = dataclasses.replace(state, skipped=state.skipped + 1)
        return
    step = int(row["step"])
    position = state.position if step == state.step else 0
    messages = prompt_messages(row)
    prompt = prompt_number(messages)
    parts = row.get("components")
    parts = {str(name): number(value) for name, value in parts.items()} if isinstance(parts, dict) else {}
    names = (*state.components, *(name for name in parts if name not in state.components))[:_MOST_COMPONENTS]
    columns = new.columns
    new.texts.append(
        (
            state.rows + len(columns["offset"]),
            str(row["completion"]),
            prompt,
            prompt_text(row),
        )
    )
    index, group, length = row.get("index"), row.get("group"), row.get("length")
    columns["offset"].append(offset)
    columns["prompt"].append(prompt)
    columns["step"].append(step)
    columns["index"].append(index if is_count(index) else position)  # type: ignore[arg-type]
    columns["group"].append(group if is_count(group) else -1)  # type: ignore[arg-type]
    columns["score"].append(number(row.get("score")))
    columns["kl"].append(number(row.get("kl")))
    columns["length"].append(number(length))
    new.components.append(parts)
    if (step, position + 1, names) != (state.step, state.position, state.components):
        new.state = dataclasses.replace(state, step=step, position=position + 1, components=names)


def _index_folder(run: RunFolder) -> tuple[Path, bool]:
    """Where the index lies, and whether it is removed at the end."""
    for folder in (run.folder / INDEX_FOLDER, cache_folder() / "board" / run.id):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder, False
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="hybrid_rlhf_board_")), True
