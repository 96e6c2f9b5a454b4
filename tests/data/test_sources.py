"""Sources of rows: files, folders, their fingerprints, and errors with the location of a row."""

from __future__ import annotations

import gzip
import json
import re
from functools import partial
from pathlib import Path

import datasets
import pyarrow
import pytest

from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.data.rows.sources import open_source, peek
from tests.support.errors import user_error

ROWS = [{"prompt": "q", "completion": "a", "margin": 1}, {"prompt": "r", "completion": "b"}]


def write_sources(folder: Path) -> dict[str, str | DataSource]:
    """The same rows in each kind of source."""
    (folder / "r.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    (folder / "r.json").write_text(json.dumps(ROWS))
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(folder / "r.parquet")
    table.save_to_disk(folder / "folder")
    datasets.DatasetDict({"train": table.select([0]), "both": table}).save_to_disk(folder / "dict")
    lines = [f"{json.dumps(row)}\n".encode() for row in ROWS]
    (folder / "r.csv").write_text('prompt,completion,margin\nq,a,1\n\nr,"b",\n')
    (folder / "r.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    with pyarrow.CompressedOutputStream(str(folder / "r.jsonl.zst"), "zstd") as file:
        file.write(b"".join(lines))
    (folder / "files" / "sub").mkdir(parents=True, exist_ok=True)
    for name, line in zip(("a.jsonl", "b.jsonl"), lines, strict=True):
        (folder / "files" / name).write_bytes(line)
    (folder / "files" / "README.md").write_text("no data")
    (folder / "other.csv").write_text("question,answer,prompt,margin\nq,a,x,1\nr,b,y,\n")
    return {
        **{name: str(folder / f"r.{name}") for name in ("jsonl", "json", "parquet", "csv", "jsonl.gz", "jsonl.zst")},
        "glob": str(folder / "f*" / "*.jsonl"),
        "files": str(folder / "files"),
        "folder": str(folder / "folder"),
        "dict": DataSource(path=str(folder / "dict"), split_name="both"),
        "columns": DataSource(
            path=str(folder / "other.csv"), columns={"prompt": "question", "completion": "answer"}, weight=2
        ),
    }


def test_all_types_of_sources_give_the_same_rows(tmp_path: Path) -> None:
    ends = {"csv": ":4", "columns": ":3", "glob": "b.jsonl:1", "files": "b.jsonl:1"}
    for kind, source in write_sources(tmp_path).items():
        rows = open_source(source)
        assert [row for _, row in rows] == ROWS, kind
        location = [location for location, _ in rows][1]
        assert location.endswith(ends.get(kind, ":2" if kind.startswith("jsonl") else f"{kind}: row 2"))
        assert peek(source) == 2 and rows.count() in (2, None)


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    for kind, source in write_sources(tmp_path).items():
        again = write_sources(tmp_path)[kind]
        assert open_source(source).fingerprint == open_source(again).fingerprint
    before = open_source(str(tmp_path / "r.jsonl")).fingerprint
    (tmp_path / "r.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert open_source(str(tmp_path / "r.jsonl")).fingerprint != before


def test_unknown_folders_and_splits_are_rejected(tmp_path: Path) -> None:
    write_sources(tmp_path)
    with user_error(r"split_name .* got 'test': set it to one of \['both', 'train'\]"):
        open_source(DataSource(path=str(tmp_path / "dict"), split_name="test"))
    with user_error("a.jsonl,b.jsonl does not exist: write several as a list"):
        open_source(f"{tmp_path}/a.jsonl,b.jsonl")
    (tmp_path / "empty").mkdir()
    with user_error("must have .* files or be written by save_to_disk, .*empty has none"):
        open_source(str(tmp_path / "empty"))


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_table_without_rows_is_rejected(kind: str, tmp_path: Path) -> None:
    empty, source = datasets.Dataset.from_dict({"text": []}), tmp_path / f"rows.{kind}"
    if kind == "parquet":
        empty.to_parquet(source)
    else:
        empty.save_to_disk(source)
    with user_error(f"must have rows, {source} is empty"):
        next(iter(open_source(str(source))))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.csv", "prompt;completion\nq;a\n", ":1: cells of a CSV file are separated by commas, got 'prompt;"),
        ("r.csv", 'prompt,completion\n"q\nq",a\nq\n', ":4: a row must have the 2 cells of the first line, got 1"),
        ("r.csv", 'prompt,completion\n"q\nr,a\n', ":2: a line must be CSV"),
        ("r.csv", "prompt,prompt\nq,a\n", ":1: the first line of a CSV file must name its columns, each once"),
        ("r.csv", "prompt,label\nq,yes\n", ":2: column 'label' of a CSV file must be JSON"),
        ("r.csv", "prompt,completion\n", "must have rows"),
        ("r.jsonl", "\n\n", "must have rows"),
        ("r.jsonl.gz", "{}", "r.jsonl.gz is not valid gzip"),
        ("r.jsonl.zst", "{}", "r.jsonl.zst is not valid zstd"),
        ("r.txt", "{}", "a data file must be .jsonl, .json, .csv, .parquet or .arrow, got"),
        ("r.csv", "prompt\n" + "q" * 200_000 + "\n", None),
    ],
)
def test_an_unreadable_file_is_named_with_its_line(
    name: str, content: str, message: str | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    if message is None:
        assert len(list(open_source(str(tmp_path / name)))) == 1
        return
    with user_error(re.escape(message)) as caught:
        list(open_source(str(tmp_path / name)))
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_text_of_csv_is_not_guessed_and_labels_are_json(tmp_path: Path) -> None:
    """An answer 007 is text, and a label is no text."""
    file = tmp_path / "r.csv"
    file.write_text('\ufeffprompt,completion,label\n"a, ""b""\nc",007,True\nd,[1],0\n')
    assert [(location, row) for location, row in open_source(str(file))] == [
        (f"{file}:2", {"prompt": 'a, "b"\nc', "completion": "007", "label": True}),
        (f"{file}:4", {"prompt": "d", "completion": "[1]", "label": 0}),
    ]


def test_files_of_several_splits_or_of_none_are_refused(tmp_path: Path) -> None:
    """A folder of train.jsonl and test.jsonl would train on its test rows."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}')
    with user_error(r"files of the splits test, train: give the files of one"):
        open_source(str(tmp_path))
    assert open_source(str(tmp_path / "*train*")).count() == 1
    with user_error("matches no file: check the pattern"):
        open_source(str(tmp_path / "*.csv"))
    (tmp_path / "x.txt").write_text("a")
    with user_error(r"a data file must be .*, got .*x\.txt"):
        open_source(str(tmp_path / "*"))


def test_a_mapped_column_must_exist_and_changes_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"a": "q", "b": "x"}\n{"a": "r"}\n')
    read = partial(DataSource, path=str(tmp_path / "r.jsonl"))
    swapped = open_source(read(columns={"b": "a", "a": "b"}))
    assert [row for _, row in swapped] == [{"b": "q", "a": "x"}, {"b": "r"}]
    assert swapped.fingerprint != open_source(read()).fingerprint
    with user_error(r"r\.jsonl: a source's columns .* no row has c, the last has a: correct"):
        list(open_source(read(columns={"prompt": "a", "text": "c"})))


def test_a_key_within_a_column_is_a_column(tmp_path: Path) -> None:
    """verl's files have the answer in a column `reward_model`, which stays."""
    (tmp_path / "r.jsonl").write_text(
        '{"reward_model": {"ground_truth": "4", "style": "rule"}}\n{"reward_model": {}}\n'
    )
    read = partial(DataSource, path=str(tmp_path / "r.jsonl"))
    first, second = (row for _, row in open_source(read(columns={"answer": "reward_model.ground_truth"})))
    assert first == {"reward_model": {"ground_truth": "4", "style": "rule"}, "answer": "4"} and "answer" not in second
    with user_error(r"no row has reward_model.x, the last has reward_model"):
        list(open_source(read(columns={"answer": "reward_model.x"})))
