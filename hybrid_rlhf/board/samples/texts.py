"""Text search over the samples of a run: SQLite's full-text index of completions and of prompts, each once.

The index holds no text, only the words' places. It grows with the columns of `index.py` and is committed after them.
If the process dies in between, it lacks the last rows, and a new one is begun.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.configs.errors import UserError

MOST_MATCHES = 100_000
"""Of a search; the newest of more are shown, so that a common word does not take seconds."""
_SCHEMA = """
CREATE VIRTUAL TABLE IF NOT EXISTS completions USING fts5(text, content='');
CREATE VIRTUAL TABLE IF NOT EXISTS prompt_texts USING fts5(text, content='');
CREATE TABLE IF NOT EXISTS prompts (number INTEGER PRIMARY KEY, preview TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS progress (rows INTEGER NOT NULL);
"""


class TextIndex:
    """The texts of one generation of an index."""

    @classmethod
    def at(cls, folder: Path, generation: str) -> Self:
        """That of a generation in the folder of an index."""
        return cls(folder / generation / "texts.sqlite", generation)

    def __init__(self, file: Path, generation: str) -> None:
        """Open or create the file.

        Raises:
            UserError: if this Python's SQLite has no full-text search.
        """
        self.generation = generation
        self._lock = threading.RLock()
        self._database = sqlite3.connect(file, timeout=5.0, check_same_thread=False, isolation_level=None)
        try:
            self._database.executescript(f"PRAGMA synchronous=OFF; PRAGMA journal_mode=TRUNCATE; {_SCHEMA}")
        except sqlite3.OperationalError as error:
            self._database.close()
            raise UserError(f"samples need SQLite with FTS5, this has none ({error}): use another Python") from None

    @contextlib.contextmanager
    def adding(self, before: int, rows: Sequence[tuple[int, str, int, str]]) -> Iterator[None]:
        """Add rows (number, completion, prompt, text of the prompt) once the block ends without an error.

        Args:
            before: rows that are there.
            rows: new ones.
        """
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._add(before, rows)
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _add(self, before: int, rows: Sequence[tuple[int, str, int, str]]) -> None:
        self._database.executemany(
            "INSERT INTO completions(rowid, text) VALUES (?, ?)", ((row, _text(text)) for row, text, _, _ in rows)
        )
        for prompt, text in {prompt: _text(text) for _, _, prompt, text in rows}.items():
            found = self._database.execute("INSERT OR IGNORE INTO prompts VALUES (?, ?)", (prompt, preview(text)))
            if found.rowcount:
                self._database.execute("INSERT INTO prompt_texts(rowid, text) VALUES (?, ?)", (prompt, text))
        self._database.execute("DELETE FROM progress")
        self._database.execute("INSERT INTO progress VALUES (?)", (before + len(rows),))

    def matches(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows whose completion has the words of a text, `word*` as a beginning, and prompts that have them.

        Raises:
            UserError: if the text has no word.
        """
        query = _query(text)
        with self._lock:
            rows = self._database.execute(
                "SELECT rowid FROM completions WHERE completions MATCH ? ORDER BY rowid DESC LIMIT ?",
                (query, MOST_MATCHES),
            ).fetchall()
        return np.array(rows, np.int64).ravel(), self.prompts_with(text)

    def prompts_with(self, text: str) -> NDArray[np.int64]:
        """The prompts that have the words of a text; see `matches`."""
        with self._lock:
            found = self._database.execute(
                "SELECT rowid FROM prompt_texts WHERE prompt_texts MATCH ? LIMIT ?", (_query(text), MOST_MATCHES)
            ).fetchall()
        return np.array(found, np.int64).ravel()

    def previews(self, prompts: Sequence[int]) -> dict[int, str]:
        """The beginning of the last message of prompts."""
        with self._lock:
            marks = ",".join("?" * len(prompts))
            found = self._database.execute(
                f"SELECT number, preview FROM prompts WHERE number IN ({marks})",  # marks alone  # nosec B608
                list(prompts),
            ).fetchall()
        return dict(found)

    def rows(self) -> int:
        """How many rows are in it."""
        with self._lock:
            found = self._database.execute("SELECT rows FROM progress").fetchone()
        return 0 if found is None else int(found[0])

    def close(self) -> None:
        """Close the file; what is being added is lost."""
        with self._lock:
            self._database.close()


def preview(text: Any, longest: int = 200) -> str:
    """The beginning of a text on one line."""
    shown = " ".join(str("" if text is None else text)[: 2 * longest].split())
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def _query(text: str) -> str:
    """Words as FTS5 reads them: quoted, all of them, as a beginning where the user wrote `word*`."""
    words = [word for word in text.split() if any(map(str.isalnum, word))]
    if not words:
        raise UserError(f"text must have a word, got {text[:40]!r}: give one")
    return " ".join(
        '"{}"{}'.format(word.rstrip("*").replace('"', '""'), "*" if word.endswith("*") else "") for word in words
    )


def _text(text: str) -> str:
    """Without lone surrogates, which SQLite does not store."""
    return text.encode(errors="replace").decode()
