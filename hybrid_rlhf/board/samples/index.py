"""An index of samples.jsonl: columns of numbers for filters, the place of each line, its prompt, and a text search.

`samples.index/` lies beside samples.jsonl, or in the cache folder where the run folder cannot be written. It has one
folder per generation with a file per column and the blocks of the texts, and `state.json`, written last and at once,
which says how many rows and which blocks count. An index that does not fit its file is left for a new generation, so
that a reader's mapped files stay as they are; it can be removed at any time. One board at a time writes; others read
what it has written.

Why columns and not tables of SQLite: counting what a filter leaves of ten million rows takes SQLite seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.board.runs.folders import RunFolder
from hybrid_rlhf.board.runs.reading import complete_lines, file_size, open_regular, parsed
from hybrid_rlhf.board.samples.lines import PROMPT_COLUMNS, NewRows
from hybrid_rlhf.board.samples.texts import BLOCK_ROWS
from hybrid_rlhf.board.samples.view import COLUMN_FORMATS, FORMAT, IndexState, IndexView, column_file
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.names import SAMPLES_FILE
from hybrid_rlhf.runtime.files.reading import cache_folder

INDEX_FOLDER = "samples.index"
_STATE = "state.json"
_READ_BYTES = 4 * 2**20
"""Of samples.jsonl at a time."""
_KEPT_SECONDS = 10.0
"""A block that was joined with others is removed after so long, when no search reads it any more."""


class SampleIndex:
    """The index of one run; may be used by several threads."""

    def __init__(self, run: RunFolder) -> None:
        """Take the run; nothing is read before `update`."""
        self.samples = run.folder / SAMPLES_FILE
        self._folder, self._removed_at_exit = _index_folder(run)
        self._lock = threading.Lock()
        self._state, self._stamp = IndexState(), 0
        self._is_checked = False
        """Whether the columns and the text search of an earlier board were looked at."""
        self._prompts: tuple[str, dict[int, int]] = ("", {})
        """The places of the prompts of a generation, by their numbers."""
        self._unused: dict[Path, float] = {}
        """Since when the state does not name a block."""

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
        if not self._state.generation or not self._continues() or not (self._is_checked or self._is_whole()):
            self._begin_generation()
        self._is_checked = True
        try:
            with open_regular(self.samples) as file:
                for lines in complete_lines(file, self._state.end, _READ_BYTES):
                    for first in range(0, len(lines), BLOCK_ROWS):
                        self._append(lines[first : first + BLOCK_ROWS])
                    if time.monotonic() > deadline:
                        return True
        except (FileNotFoundError, ValueError):  # none yet; a line without an end, so no samples.jsonl
            pass
        return False

    def view(self) -> IndexView:
        """What is indexed now."""
        return IndexView(self._state, self._folder)

    def close(self) -> None:
        """Remove a temporary index."""
        with self._lock:
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
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):  # it may be anything
            file = self._folder / _STATE
            stamp = file.stat().st_mtime_ns
            if stamp == self._stamp:
                return
            content = json.loads(file.read_text())
            if content.get("format") == FORMAT and all(
                (self._folder / content["generation"] / f"{name}.bin").exists() for name in COLUMN_FORMATS
            ):
                lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
                self._state, self._stamp = IndexState(**content | lists), stamp

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
        state = IndexState(generation=uuid.uuid4().hex[:12])
        (self._folder / state.generation).mkdir()
        for name in COLUMN_FORMATS:
            column_file(self._folder, state, name).touch()
        self._commit(state)
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder.name != state.generation:
                shutil.rmtree(folder, ignore_errors=True)

    def _commit(self, state: IndexState) -> None:
        write_whole(self._folder / _STATE, json.dumps(dataclasses.asdict(state)))
        self._state, self._stamp = state, (self._folder / _STATE).stat().st_mtime_ns

    def _is_whole(self) -> bool:
        """Whether the columns and the text search can be read: a folder may be half copied."""
        view = self.view()
        return view.has_columns() and view.completions.is_whole() and view.prompt_texts.is_whole()

    def _known_prompts(self) -> dict[int, int]:
        """The places of the prompts by their numbers; another board may have added some, or the last rows failed."""
        generation, known = self._prompts
        if generation != self._state.generation or len(known) != self._state.prompts:
            numbers = self.view().column("prompt_number").tolist()
            known = {number: place for place, number in enumerate(numbers)}
            self._prompts = (self._state.generation, known)
        return known

    def _append(self, lines: list[tuple[int, bytes]]) -> None:
        """Index at most BLOCK_ROWS lines: blocks of texts and columns, then the state, with which they count."""
        before, old = self._state, self.view()
        new = NewRows(before.rows, before.step, before.position, before.components, self._known_prompts())
        for offset, line in lines:
            new.add(offset, line)
        completions = old.completions.adding(new.completions)
        prompt_texts = old.prompt_texts.adding(new.prompt_texts)
        offset, line = lines[-1]
        state = dataclasses.replace(
            before,
            rows=completions.rows,
            end=offset + len(line) + 1,
            last=offset,
            last_crc=zlib.crc32(line),
            components=new.components,
            skipped=before.skipped + new.skipped,
            step=new.step,
            position=new.position,
            prompts=prompt_texts.rows,
            completion_blocks=completions.begins,
            prompt_blocks=prompt_texts.begins,
        )
        for name, values in new.columns.items():
            count = before.prompts if name in PROMPT_COLUMNS else before.rows
            self._write_column(state, name, count, np.array(values, COLUMN_FORMATS[name]))
        for name in state.components:
            column = np.array([row.get(name, np.nan) for row in new.parts], "<f4")
            self._write_column(state, f"component/{name}", before.rows, column)
        self._commit(state)
        self._remove_unused({*completions.files(), *prompt_texts.files()})

    def _remove_unused(self, used: set[Path]) -> None:
        """Remove blocks that have been joined with others and that no search reads any more."""
        now = time.monotonic()
        for file in set((self._folder / self._state.generation).glob("*.block")) - used:
            if now - self._unused.setdefault(file, now) > _KEPT_SECONDS:
                file.unlink(missing_ok=True)
                del self._unused[file]

    def _write_column(self, state: IndexState, name: str, before: int, values: NDArray[Any]) -> None:
        """Append to a column, over what an earlier board wrote without bringing it to its end."""
        file = column_file(self._folder, state, name)
        with file.open("r+b" if file.exists() else "w+b") as opened:
            size = before * values.itemsize
            if opened.seek(0, os.SEEK_END) < size:  # a component that appears late
                missing = before - opened.tell() // values.itemsize
                opened.write(np.full(missing, np.nan, values.dtype).tobytes())
            opened.seek(size)
            opened.write(values.tobytes())
            opened.truncate()


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
