"""The SQLite database of samples.jsonl: a row of numbers per sample, each prompt once, and a search of words (FTS5).

It is a cache below ~/.cache/hybrid_rlhf/board that may be removed at any time, one folder per host because SQLite's
write-ahead log is for the processes of one host. Lines are added in transactions together with the byte up to which the
file is indexed, so several boards can share a database, and a board that is killed leaves it consistent. A file without
the last indexed line at its offset was rewritten, and is indexed again.

The search index has no positions of words (`detail=none`) and has prefixes of up to six letters: it is small, and fast
for `word*`. Columns are read once and kept as arrays, because SQLite needs several passes over all rows, and a lookup
for each, to count and order the rows of a search and a range.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import sqlite3
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.board.runs.folders import RunFolder
from hybrid_rlhf.board.runs.reading import complete_lines, file_size, finite, is_count, number, parsed
from hybrid_rlhf.board.samples.lines import last_text, prompt_key, prompt_messages, words_of
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.names import SAMPLES_FILE
from hybrid_rlhf.runtime.files.reading import cache_folder, open_regular

Rows = NDArray[np.int64]
_FORMAT = 1
_SCHEMA = """
PRAGMA journal_mode = wal;
CREATE TABLE IF NOT EXISTS state (content);
CREATE TABLE IF NOT EXISTS samples (
    row INTEGER PRIMARY KEY, offset, prompt, step, position, group_number, score, kl, length, components
);
CREATE INDEX IF NOT EXISTS samples_of_prompt ON samples (prompt);
CREATE INDEX IF NOT EXISTS samples_of_step ON samples (step, position);
CREATE TABLE IF NOT EXISTS prompts (prompt INTEGER PRIMARY KEY, key UNIQUE);
CREATE VIRTUAL TABLE IF NOT EXISTS completion_words USING fts5(
    words, content='', columnsize=0, detail=none, tokenize=ascii, prefix='1 2 3 4 5 6'
);
CREATE VIRTUAL TABLE IF NOT EXISTS prompt_words USING fts5(
    words, content='', columnsize=0, detail=none, tokenize=ascii, prefix='1 2 3 4 5 6'
);
"""
_CLEAR = (
    "DELETE FROM samples",
    "DELETE FROM prompts",
    "INSERT INTO completion_words (completion_words) VALUES ('delete-all')",
    "INSERT INTO prompt_words (prompt_words) VALUES ('delete-all')",
)
_READ_BYTES = 4 * 2**20
"""Bytes of samples.jsonl in one transaction."""
_MOST_COMPONENTS = 64
_WAIT_SECONDS = 0.1
"""Longest wait for another thread or board that is writing."""


@dataclass(frozen=True)
class IndexState:
    """The part of samples.jsonl that a database has."""

    generation: str = ""
    """A new value each time the file is indexed from the start."""
    rows: int = 0
    end: int = 0
    """Byte up to which the file is indexed."""
    last: int = 0
    """Byte at which the last indexed line starts."""
    last_crc: int = 0
    components: list[str] = dataclasses.field(default_factory=list)
    """Names of the components, in the order of the column `components`."""
    step: int = -1
    position: int = 0
    """Position of the last row in that step, from which rows without an index are counted."""


class SampleIndex:
    """The database of one run; may be used by several threads."""

    def __init__(self, run: RunFolder) -> None:
        """Take the run; samples.jsonl is not read before `update`."""
        self.samples = run.folder / SAMPLES_FILE
        folder = cache_folder() / "board" / platform.node()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            self._temporary = tempfile.TemporaryDirectory(prefix="hybrid_rlhf_board_")
            folder = Path(self._temporary.name)
        self._file = folder / f"{run.id}_{_FORMAT}.sqlite"
        self._columns: tuple[str, dict[str, NDArray[np.float64]]] = ("", {})
        """A generation, and its columns that have been read."""

    def update(self, seconds: float) -> bool:
        """Index new lines for about `seconds`; return True if there may be more.

        Raises:
            OSError: if the samples cannot be read.
            sqlite3.Error: if the database cannot be written.
        """
        deadline = time.monotonic() + seconds
        try:
            with self._connected() as database:
                while self._append(database):
                    if time.monotonic() > deadline:
                        return True
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            return True  # another thread or board is indexing
        return False

    @contextlib.contextmanager
    def view(self) -> Iterator[SampleView]:
        """Context with the samples that are indexed now; without any if the run has removed them."""
        with self._connected() as database:
            database.execute("BEGIN")
            state = _state(database) if self.samples.exists() else IndexState()
            generation, columns = self._columns
            if generation != state.generation:
                columns = {}
                self._columns = (state.generation, columns)
            yield SampleView(self.samples, database, state, columns)

    def remove(self) -> None:
        """Delete the database."""
        for suffix in ("-wal", "-shm", ""):
            self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Context with a connection of this thread; a damaged database is replaced by an empty one."""
        database = sqlite3.connect(self._file, timeout=_WAIT_SECONDS, isolation_level=None)
        try:
            database.executescript(_SCHEMA)
            yield database
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
            self.remove()
            raise UserError(f"the index of {SAMPLES_FILE} was damaged and is made again: ask again") from error
        finally:
            database.close()

    def _append(self, database: sqlite3.Connection) -> bool:
        """Index the next lines in one transaction; return False if there are none."""
        with database:
            database.execute("BEGIN IMMEDIATE")
            state = _state(database)
            lines: list[tuple[int, bytes]] = []
            with contextlib.suppress(FileNotFoundError, ValueError):  # no file yet, or an incomplete line
                with open_regular(self.samples) as file:
                    file.seek(state.last)
                    if not state.generation or zlib.crc32(file.readline().removesuffix(b"\n")) != state.last_crc:
                        state = IndexState(uuid.uuid4().hex)
                        for statement in _CLEAR:
                            database.execute(statement)
                    lines = next(complete_lines(file, state.end, _READ_BYTES), [])
            if lines:
                state = _with_lines(database, state, lines)
                database.execute("DELETE FROM state")
                database.execute("INSERT INTO state VALUES (?)", (json.dumps(dataclasses.asdict(state)),))
        return bool(lines)


@dataclass(frozen=True)
class SampleView:
    """The samples that were indexed at a point in time."""

    samples: Path
    database: sqlite3.Connection
    state: IndexState
    known: dict[str, NDArray[np.float64]]
    """Columns read earlier, with fewer or more rows."""

    @property
    def progress(self) -> float:
        """Fraction of samples.jsonl that is indexed."""
        size = file_size(self.samples)
        return 1.0 if size <= 0 else min(self.state.end / size, 1.0)

    def column(self, name: str) -> NDArray[np.float64]:
        """A column [rows], NaN where a sample has no value; the column of a reward component is `component/NAME`."""
        known = self.known.get(name, np.empty(0))
        if len(known) < self.state.rows:
            source = name
            if name.startswith("component/"):
                place = self.state.components.index(name.removeprefix("component/"))
                source = f"json_extract(components, '$[{place}]')"
            query = f"SELECT {source} FROM samples WHERE row >= ? ORDER BY row"  # nosec B608: not a user's text
            new = self.database.execute(query, (len(known),)).fetchall()
            known = self.known[name] = np.concatenate([known, np.array(new, float).reshape(-1)])
        return known[: self.state.rows]

    def lines(self, rows: Rows | list[int]) -> list[dict[str, Any]]:
        """Rows of samples.jsonl.

        Raises:
            OSError: if the file cannot be read.
            UserError: if the file has changed since it was indexed.
        """
        contents = []
        for offset in self.column("offset")[np.asarray(rows, np.int64)].tolist():
            with open_regular(self.samples) as file:
                file.seek(int(offset))
                content = parsed(file.readline())
            if content is None or "completion" not in content:
                raise UserError(f"{SAMPLES_FILE} has changed since it was indexed: ask again")
            contents.append(content)
        return contents

    def ask(self, query: str, *values: Any) -> list[Any]:
        """The results of a query with one column."""
        return [value for (value,) in self.database.execute(query, values)]

    def rows_of_prompt(self, key: str) -> Rows:
        """The rows of a prompt; empty if the run does not have it."""
        query = "SELECT row FROM samples JOIN prompts USING (prompt) WHERE key = ? ORDER BY row"
        return np.array(self.ask(query, key), np.int64)


def search_words(text: str) -> str:
    """The FTS5 query for all words of a text; `word*` matches the beginning of words.

    Raises:
        UserError: if the text has no words.
    """
    wanted = []
    for piece in text.split():
        wanted += [f'"{word}"' for word in words_of(piece)]
        if piece.endswith("*") and words_of(piece):
            wanted[-1] += "*"
    if not wanted:
        raise UserError(f"text must have a word, got {text[:40]!r}: give one")
    return " ".join(wanted)


def _state(database: sqlite3.Connection) -> IndexState:
    stored = database.execute("SELECT content FROM state").fetchone()
    return IndexState(**json.loads(stored[0])) if stored else IndexState()


def _with_lines(database: sqlite3.Connection, state: IndexState, lines: list[tuple[int, bytes]]) -> IndexState:
    """Insert lines and return the new state; lines that are not samples are skipped."""
    rows = state.rows
    step = state.step
    position = state.position
    components = [*state.components]
    for offset, line in lines:
        row = parsed(line)
        if row is None or "completion" not in row:
            continue
        position = position + 1 if row["step"] == step else 0
        step = row["step"]
        index = row.get("index")
        group = row.get("group")
        parts = row.get("components")
        parts = parts if isinstance(parts, dict) else {}
        components = [*dict.fromkeys([*components, *parts])][:_MOST_COMPONENTS]
        values = (
            rows,
            offset,
            _prompt_number(database, row),
            step,
            index if is_count(index) else position,
            group if is_count(group) else -1,
            *(number(row.get(name)) for name in ("score", "kl", "length")),
            json.dumps([finite(number(parts.get(name))) for name in components]),
        )
        database.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        words = " ".join(words_of(str(row["completion"])))
        database.execute("INSERT INTO completion_words (rowid, words) VALUES (?, ?)", (rows, words))
        rows += 1
    end = offset + len(line) + 1
    return IndexState(state.generation, rows, end, offset, zlib.crc32(line), components, step, position)


def _prompt_number(database: sqlite3.Connection, row: dict[str, Any]) -> int:
    """The number of a prompt, which is inserted if it is new."""
    key = prompt_key(row)
    known = database.execute("SELECT prompt FROM prompts WHERE key = ?", (key,)).fetchone()
    if known is not None:
        return int(known[0])
    place = database.execute("INSERT INTO prompts (key) VALUES (?)", (key,)).lastrowid
    words = " ".join(words_of(last_text(prompt_messages(row))))
    database.execute("INSERT INTO prompt_words (rowid, words) VALUES (?, ?)", (place, words))
    return place or 0
