"""Rows and sources of the contract, and the one line that answers each row that breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections import DataSource
from hybrid_rlhf.data.rows import preference_row, prompt_row, ptx_row, sft_row
from hybrid_rlhf.data.sources import open_source

USER, ANSWER, OTHER = (
    {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"},
)  # fmt: skip
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"prompt": "q", "completion": "a"}, [USER, ANSWER]),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"prompt": [USER], "chosen": [USER, ANSWER], "rejected": "b"}, [USER, ANSWER]),
        ({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, [USER, ANSWER]),
    ],
)
def test_sft_rows(row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    assert sft_row("f:1", row).messages == messages


def test_text_rows() -> None:
    assert sft_row("f:1", {"text": "plain"}).text == "plain"
    assert ptx_row("f:1", {"text": "plain"}).text == "plain"
    assert ptx_row("f:1", {"prompt": "q", "completion": "a"}).messages == [USER, ANSWER]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    ],
)
def test_preference_rows(row: dict[str, Any]) -> None:
    record = preference_row("f:1", {**row, "margin": 2})
    assert (record.prompt, record.responses) == ([USER], [[ANSWER], [OTHER]])
    assert (record.pairs, record.margins) == ([(0, 1)], [2.0])
    assert preference_row("f:1", row).margins == [0.0]


def test_ranked_lists_become_all_their_pairs() -> None:
    record = preference_row("f:1", {"prompt": "q", "responses": ["a", "b", "c", "d"], "ranks": [2, 1, 2, 3]})
    assert sorted(record.pairs) == [(0, 3), (1, 0), (1, 2), (1, 3), (2, 3)]  # equal ranks make no pair
    assert len(record.margins) == 5
    whole = {"prompt": [USER], "responses": [[USER, ANSWER], [USER, OTHER]], "ranks": [1, 2]}
    assert preference_row("f:1", whole).responses == [[ANSWER], [OTHER]], "a prompt that is said again is not an answer"


def test_prompt_rows() -> None:
    assert prompt_row("f:1", {"prompt": "q", "answer": 4}).columns == {"answer": 4}
    assert prompt_row("f:1", {"prompt": "q"}).messages == [USER]
    assert prompt_row("f:1", {"messages": [SYSTEM, USER, ANSWER], "id": 1}).messages == [SYSTEM, USER]
    assert prompt_row("f:1", {"messages": [USER]}).messages == [USER]


BAD_ROWS = [
    (sft_row, {"instruction": "x"}, "found columns instruction"),
    (sft_row, {"messages": [USER]}, "no assistant|has none"),
    (sft_row, {"messages": []}, "column 'messages' .* empty list"),
    (sft_row, {"messages": "q"}, "column 'messages' .* a str"),
    (sft_row, {"messages": [{"role": "user"}]}, "column 'messages': a message is"),
    (sft_row, {"messages": [{"role": "bot", "content": "x"}]}, "got 'bot'"),
    (sft_row, {"prompt": "q", "completion": ""}, "column 'completion' is empty"),
    (sft_row, {"prompt": 3, "completion": "a"}, "column 'prompt' .* int"),
    (sft_row, {"text": 3}, "column 'text' is text, got a int"),
    (preference_row, {"prompt": "q", "chosen": "a"}, "found columns chosen, prompt"),
    (preference_row, {"prompt": "q", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' are equal"),
    (preference_row, {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "1"}, "column 'margin' is a number"),
    (preference_row, {"chosen": [USER], "rejected": [USER, ANSWER]}, "no answer after the prompt"),
    (preference_row, {"prompt": "q", "responses": ["a"], "ranks": [1, 2]}, "lists of one length"),
    (preference_row, {"prompt": "q", "responses": ["a", "b"], "ranks": [1, 1]}, "makes no pair"),
    (preference_row, {"prompt": "q", "responses": ["a", "a"], "ranks": [1, 2]}, "one answer above itself"),
    (preference_row, {"prompt": "q", "responses": ["a", "b"], "ranks": ["x", "y"]}, "column 'ranks' holds numbers"),
    (prompt_row, {"text": "x"}, "found columns text"),
    (prompt_row, {"messages": [ANSWER]}, "only an answer"),
]


@pytest.mark.parametrize(("adapter", "row", "rule"), BAD_ROWS)
def test_a_row_that_breaks_the_contract_is_named_in_one_line(
    adapter: Callable[..., Any], row: dict[str, Any], rule: str
) -> None:
    with pytest.raises(UserError, match=rule) as caught:
        adapter("data.jsonl:7", row)
    assert str(caught.value).startswith("data.jsonl:7: ")
    assert "\n" not in str(caught.value)


ROWS = [{"prompt": "q", "completion": "a", "extra": 1}, {"prompt": "r", "completion": "b"}]


def write_sources(folder: Path) -> dict[str, str | DataSource]:
    (folder / "r.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    (folder / "r.json").write_text(json.dumps(ROWS))
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(folder / "r.parquet")
    table.save_to_disk(folder / "folder")
    datasets.DatasetDict({"train": table.select([0]), "both": table}).save_to_disk(folder / "dict")
    return {
        **{name: str(folder / f"r.{name}") for name in ("jsonl", "json", "parquet")},
        "folder": str(folder / "folder"),
        "dict": DataSource(path=str(folder / "dict"), split_name="both"),
    }


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder", "dict"])
def test_every_kind_of_source_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    rows = open_source(write_sources(tmp_path)[kind])
    assert [row for _, row in rows] == ROWS
    places = [place for place, _ in rows]
    assert places[1].endswith(":2" if kind == "jsonl" else "row 2")


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    for kind, source in write_sources(tmp_path).items():
        again = write_sources(tmp_path)[kind]
        assert open_source(source).fingerprint == open_source(again).fingerprint
    before = open_source(str(tmp_path / "r.jsonl")).fingerprint
    (tmp_path / "r.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert open_source(str(tmp_path / "r.jsonl")).fingerprint != before


def test_folders_and_splits_that_are_none(tmp_path: Path) -> None:
    write_sources(tmp_path)
    with pytest.raises(UserError, match=r"has no split 'test': set split_name to one of \['both', 'train'\]"):
        open_source(DataSource(path=str(tmp_path / "dict"), split_name="test"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="save_to_disk wrote"):
        open_source(str(tmp_path / "empty"))
