"""The text search of samples next to a search that reads every text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybrid_rlhf.board.samples import texts as texts_module
from hybrid_rlhf.board.samples.texts import TextBlock, TextIndex, words_of
from hybrid_rlhf.configs.errors import UserError


def index_of(folder: Path, texts: list[str], sizes: list[int]) -> TextIndex:
    """An index to which the texts were added, so many at a time."""
    index = TextIndex(folder, "completions", (), 0)
    for size in sizes:
        index = index.adding(texts[index.rows : index.rows + size])
    assert index.rows == len(texts)
    return index


def read_all(texts: list[str], search: str) -> list[int]:
    """Rows whose words have, for each word of the search, one that is equal to it or begins with it."""
    found = []
    for row, text in enumerate(texts):
        words = words_of(text)
        wanted = [(word.rstrip("*"), word.endswith("*")) for word in search.split()]
        if all(any(have == word or (begins and have.startswith(word)) for have in words) for word, begins in wanted):
            found.append(row)
    return found


def test_a_search_finds_what_reading_all_texts_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "BLOCK_ROWS", 64)
    random = np.random.default_rng(0)
    words = np.array(["a", "ab", "abc", "b", "bc", "c", "ca", "zz"])
    texts = [" ".join(random.choice(words, random.integers(0, 4))) for _ in range(500)]
    sizes = [40, 1, 1, 60, 64, 3, 5, *[8] * 40, 6]
    index = index_of(tmp_path, texts, sizes)
    assert 500 / 64 <= len(index.begins) < 20 and index.is_whole()
    for search in ("a", "ab c", "a*", "b* zz", "ab* bc*", "c ca a", "nothing", "zz*"):
        found, is_limited = index.search(search)
        assert np.flatnonzero(found).tolist() == read_all(texts, search) and not is_limited, search


def test_a_search_of_too_many_occurrences_has_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "BLOCK_ROWS", 10)
    monkeypatch.setattr(texts_module, "MOST_READ", 15)
    index = index_of(tmp_path, ["word"] * 50, [10] * 5)
    found, is_limited = index.search("word")
    assert is_limited and np.flatnonzero(found).tolist() == list(range(30, 50))


def test_words_are_told_apart_in_any_script(tmp_path: Path) -> None:
    texts = [
        "Crème brûlée, 2.5 kg!",
        "Straße_42",
        "東京タワー",
        "привет Мир",
        "",
        "half \ud83d done",
        "x" * 40 + " tail",
    ]
    index = index_of(tmp_path, texts, [7])
    searches = ("creme", "BRÛL*", "kg 5", "strasse", "42", "京", "タ 東", "мир", "done", "x" * 40, "tail xxx*")
    assert [np.flatnonzero(index.search(search)[0]).tolist() for search in searches] == [
        [0], [0], [0], [1], [1], [2], [2], [3], [5], [6], [6]
    ]  # fmt: skip
    with pytest.raises(UserError, match="must have a word"):
        index.search("?! *")


def test_a_block_that_is_cut_off_is_no_block(tmp_path: Path) -> None:
    index = index_of(tmp_path, ["one two", "two"], [2])
    (file,) = index.files()
    file.write_bytes(file.read_bytes()[:-2])
    assert not index.is_whole()
    with pytest.raises(ValueError, match="no whole block"):
        TextBlock.read(file)
