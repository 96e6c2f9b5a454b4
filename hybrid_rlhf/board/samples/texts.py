"""Text search over the samples of a run: for each word the rows that have it, in blocks of at most 65,536 rows.

A block is a file that never changes: its words, sorted, then the rows of each. A word is found by bisection, and the
rows of all words with one beginning lie side by side. New rows are a new block, with which the last ones are joined as
the digits of a binary counter carry, so that a row is written a few times and a search opens few files. Which blocks
count is in the state of `index.py`.

Why no full-text index of SQLite: it took 0.3 s for the 100,000 rows of a `word*` in 300,000 samples, and 200 us per
sample to build; it merges the rows of all words, with their places in the text, before it knows which it needs.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.configs.errors import UserError

BLOCK_ROWS = 2**16
"""Most rows of a block, whose numbers are 16 bits wide."""
MOST_READ = 20_000_000
"""Occurrences that a search reads; of more, those of the newest rows."""
_WIDTH = 32
"""Bytes of a word; longer ones are told apart by so many."""
_SINGLE = "\u3040-\u30ff\u3400-\u9fff"
"""Characters of languages that are written without spaces: each is a word."""
_WORD = re.compile(rf"[{_SINGLE}]|[^\W_{_SINGLE}]+")
_ACCENTS = re.compile("[\u0300-\u036f]+")
_ASCII_WORD = re.compile("[a-z0-9]+")


def words_of(text: str) -> list[str]:
    """The words of a text, without upper case and accents."""
    text = text.casefold()
    if text.isascii():  # the same, in half of the time
        return _ASCII_WORD.findall(text)
    return _WORD.findall(_ACCENTS.sub("", unicodedata.normalize("NFKD", text)))


def preview(text: Any, longest: int = 200) -> str:
    """The beginning of a text on one line."""
    shown = " ".join(str("" if text is None else text)[: 2 * longest].split())
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


@dataclass(frozen=True)
class TextBlock:
    """Rows that follow each other, and the words of their texts."""

    words: NDArray[np.bytes_]
    """[words], ascending."""
    ends: NDArray[np.uint32]
    """[words]: where the rows of each end in `rows`."""
    rows: NDArray[np.uint16]
    """[occurrences], counted from the first row of the block; ascending for each word."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """The block of texts, one per row."""
        numbers = defaultdict[str, int](count().__next__)
        found, counts = list[int](), list[int]()
        for text in texts:
            different = set(words_of(text))
            counts.append(len(different))
            found += map(numbers.__getitem__, different)
        known = np.array([word.encode()[:_WIDTH] for word in numbers], f"S{_WIDTH}")
        words, places = np.unique(known, return_inverse=True)
        return cls._sorted(words, places[np.array(found, np.int64)], np.repeat(np.arange(len(counts)), counts))

    @classmethod
    def joined(cls, parts: Sequence[tuple[int, Self]]) -> Self:
        """One block of several, each with the number of its first row."""
        words, places = np.unique(np.concatenate([part.words for _, part in parts]), return_inverse=True)
        counts = np.concatenate([np.diff(part.ends, prepend=0) for _, part in parts])
        rows = np.concatenate([part.rows.astype(np.int64) + first - parts[0][0] for first, part in parts])
        return cls._sorted(words, np.repeat(places, counts), rows)

    @classmethod
    def _sorted(cls, words: NDArray[Any], places: NDArray[Any], rows: NDArray[Any]) -> Self:
        """Of occurrences (place of the word, row), by row."""
        order = np.argsort(places.astype(np.min_scalar_type(len(words))), kind="stable")  # 16 bits: linear
        ends = np.cumsum(np.bincount(places, minlength=len(words)))
        return cls(words, ends.astype(np.uint32), rows[order].astype(np.uint16))

    @classmethod
    def read(cls, file: Path) -> Self:
        """A block, mapped from its file.

        Raises:
            FileNotFoundError: if it has been joined with others long ago.
            ValueError: if it is not as `write` left it.
        """
        content = np.asarray(np.memmap(file, np.uint8, mode="r"))
        words, rows = (int(count) for count in content[:16].view(np.int64)) if len(content) >= 16 else (-1, 0)
        first, last = 16 + _WIDTH * words, 16 + (_WIDTH + 4) * words
        if words < 0 or last + 2 * rows != len(content):
            raise ValueError(f"{file.name} is no whole block of an index")
        return cls(
            content[16:first].view(f"S{_WIDTH}"), content[first:last].view(np.uint32), content[last:].view("<u2")
        )

    def write(self, file: Path) -> None:
        """Write the file; it counts once a state names it."""
        sizes = np.array([len(self.words), len(self.rows)], np.int64)
        file.write_bytes(b"".join(part.tobytes() for part in (sizes, self.words, self.ends, self.rows)))

    def rows_with(self, first: NDArray[np.bytes_], last: NDArray[np.bytes_]) -> NDArray[np.uint16]:
        """The rows of all words from `first` to `last` [1]; a row of several words more than once."""
        begin = int(np.searchsorted(self.words, first, side="left")[0])
        end = int(np.searchsorted(self.words, last, side="right")[0])
        if begin == end:
            return self.rows[:0]
        return self.rows[int(self.ends[begin - 1]) if begin else 0 : int(self.ends[end - 1])]


@dataclass(frozen=True)
class TextIndex:
    """The blocks of the texts of one kind: completions or prompts."""

    folder: Path
    kind: str
    begins: tuple[int, ...]
    """The first row of each block, which reaches to the next one."""
    rows: int

    def files(self) -> list[Path]:
        """The file of each block."""
        return [self.folder / f"{self.kind}_{first}_{last}.block" for first, last in self._ranges()]

    def _ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.begins, (*self.begins, self.rows)[1:], strict=True))

    def is_whole(self) -> bool:
        """Whether all blocks are there and can be read."""
        try:
            for file in self.files():
                TextBlock.read(file)
        except (OSError, ValueError):
            return False
        return True

    def adding(self, texts: Sequence[str]) -> TextIndex:
        """This index with more rows, at most BLOCK_ROWS, whose block is written; the files of both are there."""
        if not texts:
            return self
        begins, first, end = list(self.begins), self.rows, self.rows + len(texts)
        parts = [(first, TextBlock.of(texts))]
        files = self.files()
        while begins and first - begins[-1] <= end - first and end - begins[-1] <= BLOCK_ROWS:
            first = begins.pop()
            parts.insert(0, (first, TextBlock.read(files[len(begins)])))
        new = TextIndex(self.folder, self.kind, (*begins, first), end)
        block = parts[0][1] if len(parts) == 1 else TextBlock.joined(parts)
        block.write(new.files()[-1])
        return new

    def search(self, text: str) -> tuple[NDArray[np.bool_], bool]:
        """Which rows [rows] have all words of a text, `word*` as a beginning; and whether only the newest were read.

        Raises:
            UserError: if the text has no word.
        """
        wanted = _wanted(text)
        found, left = np.zeros(self.rows, bool), MOST_READ
        for (first, last), file in reversed(list(zip(self._ranges(), self.files(), strict=True))):
            if left <= 0:
                return found, True
            block = TextBlock.read(file)
            has_all = np.ones(last - first, bool)
            for bounds in wanted:
                rows = block.rows_with(*bounds)
                left -= len(rows)
                has = np.zeros(last - first, bool)
                has[rows] = True
                has_all &= has
                if not len(rows):
                    break
            found[first:last] = has_all
        return found, False


def _wanted(text: str) -> list[tuple[NDArray[np.bytes_], NDArray[np.bytes_]]]:
    """The first and the last word [1] that each word of a search stands for."""
    wanted = []
    for piece in text.split():
        words = [word.encode()[:_WIDTH] for word in words_of(piece)]
        wanted += [(word, word) for word in words]
        if words and piece.endswith("*"):
            wanted[-1] = (words[-1], words[-1].ljust(_WIDTH, b"\xff"))
    if not wanted:
        raise UserError(f"text must have a word, got {text[:40]!r}: give one")
    return [(np.array([first], f"S{_WIDTH}"), np.array([last], f"S{_WIDTH}")) for first, last in wanted]
