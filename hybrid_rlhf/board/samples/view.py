"""The rows that an index had at one time, for queries: columns mapped from their files, and the text search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.board.runs.reading import file_size
from hybrid_rlhf.board.samples.lines import PROMPT_COLUMNS, ROW_COLUMNS
from hybrid_rlhf.board.samples.texts import TextIndex

FORMAT = 2
COLUMN_FORMATS = ROW_COLUMNS | PROMPT_COLUMNS
_COUNT_ROWS = 2**20
"""Rows that are counted at a time, so that no column is copied whole."""


@dataclass(frozen=True)
class IndexState:
    """What of an index counts."""

    format: int = FORMAT
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
    prompts: int = 0
    completion_blocks: tuple[int, ...] = ()
    prompt_blocks: tuple[int, ...] = ()
    """The first row or prompt of each block of the text search."""


@dataclass(frozen=True)
class IndexView:
    """The rows that an index had at one time."""

    state: IndexState
    folder: Path

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.state.rows

    @property
    def completions(self) -> TextIndex:
        """The text search of completions, by row."""
        return TextIndex(self.folder / self.state.generation, "completions", self.state.completion_blocks, self.rows)

    @property
    def prompt_texts(self) -> TextIndex:
        """The text search of the last message of prompts, by the place of the prompt."""
        folder = self.folder / self.state.generation
        return TextIndex(folder, "prompts", self.state.prompt_blocks, self.state.prompts)

    def column(self, name: str) -> NDArray[Any]:
        """A column, mapped from its file, of rows or of prompts; of a component as `component/NAME`.

        Raises:
            FileNotFoundError: if the index has begun a new generation.
        """
        kind, count = self._shape(name)
        if not count:
            return np.empty(0, kind)
        return np.asarray(np.memmap(column_file(self.folder, self.state, name), kind, mode="r", shape=(count,)))

    def has_columns(self) -> bool:
        """Whether no file of a column is too short."""
        for name in (*COLUMN_FORMATS, *(f"component/{name}" for name in self.state.components)):
            kind, count = self._shape(name)
            if file_size(column_file(self.folder, self.state, name)) < count * kind.itemsize:
                return False
        return True

    def _shape(self, name: str) -> tuple[np.dtype[Any], int]:
        """Type and length of a column."""
        return np.dtype(COLUMN_FORMATS.get(name, "<f4")), self.state.prompts if name in PROMPT_COLUMNS else self.rows

    def prompt_place(self, number: int) -> int | None:
        """The place of the prompt of a number; None: the run does not have it."""
        found = np.flatnonzero(self.column("prompt_number") == number)
        return int(found[0]) if len(found) else None

    def rows_of_prompt(self, number: int) -> NDArray[np.int64]:
        """The rows of the prompt of a number."""
        place = self.prompt_place(number)
        return np.empty(0, np.int64) if place is None else np.flatnonzero(self.column("prompt") == place)

    def rows_of_prompts(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows [rows] are of the chosen prompts [prompts]."""
        if not chosen.any():
            return np.zeros(self.rows, bool)
        return np.concatenate([chosen[part] for part in self._parts_of_prompts()])

    def prompt_counts(self) -> NDArray[np.int64]:
        """How many rows each prompt has [prompts]."""
        counts = np.zeros(self.state.prompts, np.int64)
        for part in self._parts_of_prompts():
            counts += np.bincount(part, minlength=len(counts))
        return counts

    def _parts_of_prompts(self) -> Iterator[NDArray[np.int32]]:
        column = self.column("prompt")
        return (column[first : first + _COUNT_ROWS] for first in range(0, self.rows, _COUNT_ROWS))


def column_file(folder: Path, state: IndexState, name: str) -> Path:
    """The file of a column of `IndexView.column`."""
    if name.startswith("component/"):
        name = f"component_{state.components.index(name.removeprefix('component/'))}"
    return folder / state.generation / f"{name}.bin"
