"""Samples: filters, order, pages, the index beside the file, and single samples with their tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybrid_rlhf.board.runs.folders import RunFolder, run_id
from hybrid_rlhf.board.samples.index import SampleIndex
from hybrid_rlhf.board.samples.queries import SampleQuery, find
from tests.support.board import WORDS, ServedBoard, append_rows, sample_rows, served_board, write_run
from tests.support.errors import user_error
from tests.support.tiny import tiny_tokenizer

STEPS, COUNT = 6, 20


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBoard]:
    folder = tmp_path_factory.mktemp("board") / "output"
    run = write_run(folder / "one", steps=STEPS, samples=COUNT)
    tiny_tokenizer().save_pretrained(run)
    write_tokens(run, step=2)
    write_run(folder / "two", steps=2, samples=8, seed=2)
    old = write_run(folder / "old", steps=1)
    keys = ("step", "prompt", "completion", "score", "kl", "weight_versions")
    append_rows(old, [{key: row[key] for key in keys} for row in sample_rows(1, 5)])
    append_rows(old, [{"step": 2, "prompt": "plain", "completion": "half \ud83d <b>&", "score": None, "kl": None}])
    with served_board(folder) as served:
        yield served


def write_tokens(run: Path, step: int) -> None:
    """Token records of a step of two samples, `ab` and then `cd` or `c`."""
    ids = np.array([*tiny_tokenizer()("abcd")["input_ids"], *tiny_tokenizer()("abc")["input_ids"]], np.int32)
    (run / "tokens").mkdir()
    save_file(
        {
            "offsets": np.array([0, 4, 7]),
            "response_offsets": np.array([0, 2, 3]),
            "prompt_lengths": np.array([2, 2]),
            "ids": ids,
            "response": np.array([False, False, True, True, False, False, True]),
            "columns.logprobs": np.array([-1.0, np.nan, -3.0], np.float32),
        },
        run / "tokens" / f"step_{step:08}.safetensors",
    )


def rows_of(board: ServedBoard, name: str = "one", **query: Any) -> list[tuple[int, int]]:
    page = board.get(f"/api/runs/{board.run(name)['id']}/samples", limit=500, **query)
    assert page["total"] == len(page["rows"])
    return [(row["step"], row["index"]) for row in page["rows"]]


ALL = [(row["step"], row["index"], row) for step in range(1, STEPS + 1) for row in sample_rows(step, COUNT)]


@pytest.mark.parametrize(
    ("query", "rule"),
    [
        ({}, lambda row: True),
        ({"step": 3}, lambda row: row["step"] == 3),
        ({"score_min": 4.0, "score_max": 9}, lambda row: 4 <= row["score"] <= 9),
        ({"length_max": 7, "step": 2}, lambda row: row["length"] <= 7 and row["step"] == 2),
        ({"kl_min": 0.1}, lambda row: row["kl"] >= 0.1),
        ({"component": "model", "component_min": 18}, lambda row: row["components"]["model"] >= 18),
        ({"text": "lantern"}, lambda row: "lantern" in row["completion"] + row["prompt"][0]["content"]),
        ({"text": "lantern", "score_max": 1}, lambda row: row["score"] <= 1 and "lantern" in json.dumps(row)),
        ({"score_min": 5, "score_max": 4}, lambda row: False),
    ],
)
def test_a_filter_leaves_what_it_says(board: ServedBoard, query: dict[str, Any], rule: Any) -> None:
    assert rows_of(board, **query) == [(step, index) for step, index, row in ALL if rule(row)]


@pytest.mark.parametrize("sort", ["score", "length", "kl", "step"])
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_are_parts_of_one_order(board: ServedBoard, sort: str, order: str) -> None:
    whole = rows_of(board, sort=sort, order=order)
    run = board.run("one")["id"]
    paged: list[tuple[int, int]] = []
    for offset in range(0, len(ALL) + 10, 17):
        page = board.get(f"/api/runs/{run}/samples", sort=sort, order=order, offset=offset, limit=17)
        assert page["total"] == len(ALL) and page["steps"] == list(range(1, STEPS + 1))
        paged += [(row["step"], row["index"]) for row in page["rows"]]
    assert paged == whole and sorted(whole) == [(step, index) for step, index, _ in ALL]
    values = {(step, index): row[sort] for step, index, row in ALL}
    assert [values[place] for place in whole] == sorted(values.values(), reverse=order == "desc")


def test_rows_of_an_older_run_lack_fields_and_come_last(board: ServedBoard) -> None:
    run = board.run("old")["id"]
    page = board.get(f"/api/runs/{run}/samples", sort="score", order="desc")
    assert [(row["step"], row["index"]) for row in page["rows"]] == [(1, 4), (1, 3), (1, 2), (1, 1), (1, 0), (2, 0)]
    assert page["components"] == [] and page["rows"][0]["length"] is None and page["rows"][0]["group"] is None
    last = board.get(f"/api/runs/{run}/samples/2/0")
    assert last["prompt"] == [{"role": "user", "content": "plain"}] and last["score"] is None
    assert last["completion"] == "half \ud83d <b>&"


def test_a_sample_has_its_tokens(board: ServedBoard) -> None:
    run = board.run("one")["id"]
    sample = board.get(f"/api/runs/{run}/samples/2/1")
    assert sample["completion"] == sample_rows(2, 2)[1]["completion"]
    assert sample["components"] == {"model": 1.0, "length": -1.0} and sample["weight_versions"] == [[1, 6]]
    assert sample["tokens"]["texts"] == ["a", "b", "c"] and sample["tokens"]["response"] == [0, 0, 1]
    assert sample["tokens"]["columns"] == {"logprobs": [None, None, -3.0]}
    first = board.get(f"/api/runs/{run}/samples/2/0")
    assert first["tokens"]["columns"]["logprobs"] == [None, None, -1.0, None]
    assert board.get(f"/api/runs/{run}/samples/3/1")["tokens"] is None
    assert board.ask(f"/api/runs/{run}/samples/{10**30}/0").status_code == 400, "no number that SQLite lacks"
    assert {row["has_tokens"] for row in board.get(f"/api/runs/{run}/samples", step=2)["rows"]} == {True}


def test_distributions_of_a_step_have_the_ranges_of_the_run(board: ServedBoard) -> None:
    path = f"/api/runs/{board.run('one')['id']}"
    newest, first = board.get(f"{path}/distributions"), board.get(f"{path}/distributions", step=1)
    assert newest["step"] == STEPS and first["step"] == 1
    for name in ("score", "length"):
        values = [row[name] for _, _, row in ALL]
        edges = newest[name]["edges"]
        assert edges == first[name]["edges"] and (edges[0], edges[-1]) == (min(values), max(values))
        counts, _ = np.histogram(values[-COUNT:], bins=edges)
        assert newest[name]["counts"] == counts.tolist() and sum(first[name]["counts"]) == COUNT
    largest = max(abs(value) for _, _, row in ALL for value in row["components"].values())
    assert board.get(f"{path}/samples/1/0")["component_limit"] == largest, "one scale for the bars of a run"


def test_prompts_count_their_own_samples(board: ServedBoard) -> None:
    path, texts = f"/api/runs/{board.run('one')['id']}/prompts", [f"Say {word}" for word in WORDS[: COUNT // 4]]
    pages = [board.get(path, offset=offset, limit=2)["rows"] for offset in range(0, len(texts), 2)]
    shown = {row.pop("preview"): row for page in pages for row in page}
    assert list(shown) == texts
    for group, text in enumerate(texts):
        own = [row for _, _, row in ALL if row["group"] == group]
        assert shown[text]["samples"] == len(own) and shown[text]["steps"] == list(range(1, STEPS + 1))
        assert shown[text]["mean_score"] == pytest.approx(np.mean([row["score"] for row in own]))


def test_a_prompt_is_the_same_across_runs(board: ServedBoard) -> None:
    one, two = board.run("one")["id"], board.run("two")["id"]
    prompts = board.get(f"/api/runs/{one}/prompts", text="river")
    assert prompts["total"] == 1
    key = prompts["rows"][0]["prompt_key"]
    found = board.get(f"/api/prompts/{key}")
    assert found["prompt"] == [{"role": "user", "content": "Say river"}]
    assert {row["run"] for row in found["rows"]} >= {one, two}
    assert {row["prompt_key"] for row in found["rows"]} == {key}
    assert board.ask("/api/prompts/0123456789abcdef").status_code == 404
    assert board.get(f"/api/runs/{one}/samples", prompt=key)["total"] == 4 * STEPS


def index_of(folder: Path) -> SampleIndex:
    return SampleIndex(RunFolder(run_id(folder), folder.name, folder))


def steps_in(index: SampleIndex) -> list[int]:
    while index.update(1.0):
        pass
    with index.view() as view:
        return [int(step) for step in view.column("step")]


def found_in(index: SampleIndex, **query: Any) -> list[int]:
    """The rows that a query finds."""
    with index.view() as view:
        return find(view, SampleQuery(**query)).tolist()


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of each test, so that no test finds the database of another."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_the_index_reads_on_and_is_kept(tmp_path: Path) -> None:
    append_rows(tmp_path, sample_rows(1, 3))
    first = index_of(tmp_path)
    assert steps_in(first) == [1, 1, 1]
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(json.dumps(sample_rows(2, 1)[0]).encode())
    assert steps_in(first) == [1, 1, 1]  # the line has no end yet
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b"\n")
    assert steps_in(first) == [1, 1, 1, 2]
    with first.view() as before, index_of(tmp_path).view() as again:
        assert again.state == before.state and again.state.rows == 4
    assert {file.name for file in tmp_path.iterdir()} == {"samples.jsonl"}, "the run folder stays as it is"


def test_an_index_that_does_not_fit_begins_anew(tmp_path: Path) -> None:
    append_rows(tmp_path, [*sample_rows(1, 3), *sample_rows(2, 3)])
    index = index_of(tmp_path)
    assert steps_in(index) == [1] * 3 + [2] * 3
    lines = (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "beside").write_bytes(b"".join(lines[:3]))
    with index.view() as view:
        os.replace(tmp_path / "beside", tmp_path / "samples.jsonl")
        append_rows(tmp_path, [{**row, "completion": "resumed otherwise"} for row in sample_rows(2, 5)])
        assert steps_in(index) == [1] * 3 + [2] * 5
        assert len(view.column("score")) == 6, "a view is of one time"
    assert found_in(index, text="resumed") == [3, 4, 5, 6, 7] and found_in(index, text="number") == [0, 1, 2]
    (tmp_path / "samples.jsonl").unlink()
    assert steps_in(index) == []
    append_rows(tmp_path, sample_rows(7, 2))
    assert steps_in(index) == [7, 7]


@pytest.mark.parametrize("damage", [slice(0, 100), slice(4096, None)])
def test_a_damaged_index_is_made_again(tmp_path: Path, home: Path, damage: slice) -> None:
    append_rows(tmp_path, sample_rows(1, 3))
    steps_in(index_of(tmp_path))
    (file,) = home.rglob("*.sqlite")
    content = bytearray(file.read_bytes())
    content[damage] = b"x" * len(content[damage])
    file.write_bytes(content)
    with user_error("was damaged and is made again: ask again"):
        steps_in(index_of(tmp_path))
    again = index_of(tmp_path)
    assert steps_in(again) == [1, 1, 1] and found_in(again, text="number") == [0, 1, 2]


def test_components_that_appear_late_are_missing_before(tmp_path: Path) -> None:
    append_rows(tmp_path, sample_rows(1, 3))
    index = index_of(tmp_path)
    steps_in(index)
    append_rows(tmp_path, [{**row, "components": {'la"te': 1.5}} for row in sample_rows(2, 2)])
    assert steps_in(index) == [1, 1, 1, 2, 2]
    with index.view() as view:
        late = view.column('component/la"te')
        assert np.isnan(late[:3]).all() and late[3:].tolist() == [1.5, 1.5]
    assert found_in(index, component='la"te', component_min=1) == [3, 4]


def test_two_boards_share_an_index(tmp_path: Path) -> None:
    append_rows(tmp_path, sample_rows(1, 3))
    one, two = index_of(tmp_path), index_of(tmp_path)
    assert steps_in(one) == steps_in(two) == [1, 1, 1]
    append_rows(tmp_path, sample_rows(2, 2))
    with one._connected() as writing:
        writing.execute("BEGIN IMMEDIATE")
        assert two.update(0.1) and found_in(two, text="number") == [0, 1, 2], "one indexes, the other reads"
    assert steps_in(two) == steps_in(one) == [1, 1, 1, 2, 2]
    assert found_in(one, text="number", step=2) == [3, 4]


def test_without_a_home_the_index_is_temporary(tmp_path: Path, home: Path) -> None:
    (home / ".cache").write_text("a file where the folder would be")  # root may write to any folder
    append_rows(tmp_path, sample_rows(1, 3))
    assert steps_in(index_of(tmp_path)) == [1, 1, 1]


def test_a_search_finds_what_reading_all_texts_finds(tmp_path: Path) -> None:
    """Over several transactions, whose words SQLite joins later."""
    random = np.random.default_rng(0)
    words = np.array(["a", "ab", "abc", "b", "bc", "c", "ca", "zz", "sevenletters"])
    texts = [" ".join(random.choice(words, random.integers(0, 4))) for _ in range(500)]
    index = index_of(tmp_path)
    for first in range(0, 500, 50):
        rows = [{"step": 1, "prompt": "", "completion": text} for text in texts[first : first + 50]]
        append_rows(tmp_path, rows)
        steps_in(index)
    for search in ("a", "ab c", "a*", "b* zz", "ab* bc*", "c ca a", "nothing", "zz*", "sevenlett*"):
        wanted = [(word.rstrip("*"), word.endswith("*")) for word in search.split()]
        matches = [
            row
            for row, text in enumerate(texts)
            if all(
                any(has == word or (begins and has.startswith(word)) for has in text.split()) for word, begins in wanted
            )
        ]
        assert found_in(index, text=search) == matches, search


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
    append_rows(tmp_path, [{"step": 1, "prompt": "", "completion": text} for text in texts])
    index = index_of(tmp_path)
    steps_in(index)
    searches = ("creme", "BRÛL*", "kg 5", "strasse", "42", "京", "タ 東", "мир", "done", "x" * 40, "tail xxx*")
    assert [found_in(index, text=search) for search in searches] == [
        [0], [0], [0], [1], [1], [2], [2], [3], [5], [6], [6]
    ]  # fmt: skip
    for text in ("?! *", "*"):
        with user_error("must have a word"):
            found_in(index, text=text)
    assert found_in(index, text="NOT near(a) OR " + "a " * 400) == [], "no word is an operator"


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_rows_of_equal_and_missing_scores_keep_the_order_of_the_file(tmp_path: Path, order: str) -> None:
    random = np.random.default_rng(0)
    scores = random.integers(0, 4, 200).astype(float)
    scores[random.integers(0, 200, 20)] = np.nan
    scores[random.integers(0, 200, 20)] = np.inf
    rows = [{"step": 1, "prompt": "", "completion": "", "score": float(score)} for score in scores]
    append_rows(tmp_path, rows)
    index = index_of(tmp_path)
    steps_in(index)
    expected = np.argsort(-scores if order == "desc" else scores, kind="stable")  # NaN is last in either order
    assert found_in(index, sort="score", order=order) == expected.tolist()
