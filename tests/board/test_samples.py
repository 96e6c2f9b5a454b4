"""Samples: filters, order, pages, the index beside the file, and single samples with their tokens."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybrid_rlhf.board.runs.folders import RunFolder, run_id
from hybrid_rlhf.board.samples import index as index_module
from hybrid_rlhf.board.samples import queries
from hybrid_rlhf.board.samples.index import SampleIndex
from hybrid_rlhf.board.samples.queries import SampleQuery, find
from tests.support.board import WORDS, ServedBoard, append_rows, sample_rows, served_board, write_run
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
        ({"text": "number 1"}, lambda row: "1" in row["completion"].split()),
        ({"text": "numb* 1*"}, lambda row: " 1" in row["completion"]),
        ({"text": "lantern", "score_max": 1}, lambda row: row["score"] <= 1 and "lantern" in json.dumps(row)),
        ({"text": "nowhere"}, lambda row: False),
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
    assert {row["has_tokens"] for row in board.get(f"/api/runs/{run}/samples", step=2)["rows"]} == {True}


def test_distributions_of_a_step_have_the_ranges_of_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "output" / "one", steps=1)
    append_rows(folder, [row for step in (1, 2) for row in sample_rows(step, 8)])
    with served_board(tmp_path / "output") as board:
        path = f"/api/runs/{board.run('one')['id']}"
        newest, first = board.get(f"{path}/distributions"), board.get(f"{path}/distributions", step=1)
        assert newest["step"] == 2 and first["step"] == 1
        rows = {step: sample_rows(step, 8) for step in (1, 2)}
        for name in ("score", "length"):
            values = [row[name] for of_step in rows.values() for row in of_step]
            edges = newest[name]["edges"]
            assert edges == first[name]["edges"] and (edges[0], edges[-1]) == (min(values), max(values))
            counts, _ = np.histogram([row[name] for row in rows[2]], bins=edges)
            assert newest[name]["counts"] == counts.tolist() and sum(first[name]["counts"]) == 8
        largest = max(abs(value) for row in rows[1] + rows[2] for value in row["components"].values())
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
    assert prompts["total"] == 1 and prompts["rows"][0]["samples"] == 4 * STEPS
    key = prompts["rows"][0]["prompt_key"]
    scores = [row["score"] for _, _, row in ALL if row["group"] == 0]
    assert prompts["rows"][0]["mean_score"] == pytest.approx(np.mean(scores))
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
    return [int(step) for step in index.view().column("step")]


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
    generation = first.view().state.generation
    first.close()
    again = index_of(tmp_path)
    assert steps_in(again) == [1, 1, 1, 2] and again.view().state.generation == generation


def test_an_index_that_does_not_fit_begins_anew(tmp_path: Path) -> None:
    append_rows(tmp_path, [*sample_rows(1, 3), *sample_rows(2, 3)])
    index = index_of(tmp_path)
    before = index.view() if steps_in(index) else None
    lines = (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "beside").write_bytes(b"".join(lines[:3]))
    os.replace(tmp_path / "beside", tmp_path / "samples.jsonl")
    append_rows(tmp_path, [{**row, "completion": "resumed otherwise"} for row in sample_rows(2, 5)])
    assert steps_in(index) == [1] * 3 + [2] * 5
    assert find(index.view(), SampleQuery(text="resumed")).total == 5
    assert before is not None and [
        entry.name for entry in (tmp_path / "samples.index").iterdir() if entry.is_dir()
    ] == [index.view().state.generation]


@pytest.mark.parametrize(
    "damage", ["{", "[]", "3", '{"format": 2}', "texts", "columns", "step.bin", "prompt_row.bin", "component_1.bin"]
)
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: str) -> None:
    append_rows(tmp_path, sample_rows(1, 3))
    index = index_of(tmp_path)
    steps_in(index)
    folder = tmp_path / "samples.index"
    inside = folder / index.view().state.generation
    index.close()
    if damage.endswith(".bin"):  # half copied
        (inside / damage).write_bytes((inside / damage).read_bytes()[:-1])
    elif damage not in ("texts", "columns"):
        (folder / "state.json").write_text(damage)
    elif damage == "texts":
        (file,) = inside.glob("completions_*.block")
        file.write_bytes(file.read_bytes()[:-2])
    else:
        shutil.rmtree(inside)
    again = index_of(tmp_path)
    assert steps_in(again) == [1, 1, 1]
    assert find(again.view(), SampleQuery(text="number")).total == 3


def test_rows_that_were_written_and_not_counted_are_written_again(tmp_path: Path) -> None:
    append_rows(tmp_path, sample_rows(1, 3))
    index = index_of(tmp_path)
    steps_in(index)
    column = tmp_path / "samples.index" / index.view().state.generation / "step.bin"
    with column.open("ab") as file:
        file.write(np.array([9, 9], "<i4").tobytes())
    append_rows(tmp_path, [{**row, "components": {"late": 1.5}} for row in sample_rows(2, 2)])
    assert steps_in(index) == [1, 1, 1, 2, 2]
    late = index.view().column("component/late")
    assert np.isnan(late[:3]).all() and late[3:].tolist() == [1.5, 1.5]


def test_two_boards_share_an_index(tmp_path: Path) -> None:
    append_rows(tmp_path, sample_rows(1, 3))
    one, two = index_of(tmp_path), index_of(tmp_path)
    assert steps_in(one) == steps_in(two) == [1, 1, 1]
    append_rows(tmp_path, sample_rows(2, 2))
    assert steps_in(two) == steps_in(one) == [1, 1, 1, 2, 2]
    assert one.view().state == two.view().state
    assert find(one.view(), SampleQuery(text="number", step=2)).total == 2


def test_a_folder_that_cannot_be_written_has_its_index_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "run"
    folder.mkdir()
    append_rows(folder, sample_rows(1, 3))
    (folder / "samples.index").write_text("a file where the index would be")  # root may write to any folder
    index = index_of(folder)
    assert steps_in(index) == [1, 1, 1]
    assert (tmp_path / "home" / ".cache" / "hybrid_rlhf" / "board" / run_id(folder) / "state.json").exists()
    assert (folder / "samples.index").read_text() == "a file where the index would be"


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sampled", [2**16, 64])
def test_ranks_are_those_of_a_stable_sort(monkeypatch: pytest.MonkeyPatch, descending: bool, sampled: int) -> None:
    """With a sample of all keys, and with one that misleads: keys that repeat at its stride, equal and missing ones."""
    monkeypatch.setattr(queries, "_SAMPLED", sampled)
    monkeypatch.setattr(queries, "_SLACK", 4)
    random = np.random.default_rng(0)
    for keys in (random.integers(0, 4, 10_000), random.normal(size=10_000), np.arange(9984) % 156, np.zeros(100)):
        keys = keys.astype(np.float32)
        keys[random.integers(0, len(keys), 50)] = np.inf
        keys[random.integers(0, len(keys), 50)] = np.nan
        whole = np.argsort(-keys if descending else keys, kind="stable")  # NaN is last in either order
        pages = ((0, 50), (49, 50), (70, 90), (len(keys) // 2, len(keys) // 2 + 17), (len(keys) - 60, len(keys)))
        for first, last in (*pages, (0, len(keys))):
            found = queries._ranked(keys, first, last, descending=descending)
            assert found.tolist() == whole[first:last].tolist()


def test_a_state_is_what_is_written(tmp_path: Path) -> None:
    append_rows(tmp_path, sample_rows(1, 2))
    index = index_of(tmp_path)
    steps_in(index)
    stored = json.loads((tmp_path / "samples.index" / "state.json").read_text())
    assert stored == json.loads(json.dumps(dataclasses.asdict(index.view().state)))
    assert stored["end"] == (tmp_path / "samples.jsonl").stat().st_size


def test_blocks_are_joined_and_the_old_ones_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_KEPT_SECONDS", -1.0)
    index = index_of(tmp_path)
    for step in range(1, 12):
        append_rows(tmp_path, sample_rows(step, 2))
        steps_in(index)
    view = index.view()
    assert [last - first for first, last in zip(view.state.completion_blocks, (16, 20, 22), strict=True)] == [16, 4, 2]
    kept = {*view.completions.files(), *view.prompt_texts.files()}
    assert set((tmp_path / "samples.index" / view.state.generation).glob("*.block")) == kept
    assert find(view, SampleQuery(text="step 3")).rows.tolist() == [4, 5]
