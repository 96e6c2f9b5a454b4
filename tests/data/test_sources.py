"""Sources of rows: files, folders, their fingerprints, and errors with the location of a row."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.data.rows.formats import read_sft_row
from hybrid_rlhf.data.rows.sources import open_source

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
def test_all_types_of_sources_give_the_same_rows(kind: str, tmp_path: Path) -> None:
    rows = open_source(write_sources(tmp_path)[kind])
    assert [row for _, row in rows] == ROWS
    locations = [location for location, _ in rows]
    assert locations[1].endswith(":2" if kind == "jsonl" else "row 2")


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    for kind, source in write_sources(tmp_path).items():
        again = write_sources(tmp_path)[kind]
        assert open_source(source).fingerprint == open_source(again).fingerprint
    before = open_source(str(tmp_path / "r.jsonl")).fingerprint
    (tmp_path / "r.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert open_source(str(tmp_path / "r.jsonl")).fingerprint != before


def test_unknown_folders_and_splits_are_rejected(tmp_path: Path) -> None:
    write_sources(tmp_path)
    with pytest.raises(UserError, match=r"split_name .* got 'test': set it to one of \['both', 'train'\]"):
        open_source(DataSource(path=str(tmp_path / "dict"), split_name="test"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="written by save_to_disk, .*empty is not"):
        open_source(str(tmp_path / "empty"))


@pytest.mark.parametrize("kind", ["json", "parquet", "folder"])
def test_an_invalid_row_of_a_table_is_named_by_its_number(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": " "}]
    source = tmp_path / ("rows" if kind == "folder" else f"rows.{kind}")
    if kind == "json":
        source.write_text(json.dumps(rows))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(source)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(source)
    with pytest.raises(UserError) as caught:
        [read_sft_row(location, row) for location, row in open_source(str(source))]
    assert str(caught.value).startswith(f"{source}: row 2: column 'completion' must not be empty, got ' '")


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_table_without_rows_is_rejected(kind: str, tmp_path: Path) -> None:
    empty, source = datasets.Dataset.from_dict({"text": []}), tmp_path / f"rows.{kind}"
    if kind == "parquet":
        empty.to_parquet(source)
    else:
        empty.save_to_disk(source)
    with pytest.raises(UserError) as caught:
        open_source(str(source))
    assert f"must have rows, {source} is empty" in str(caught.value)


def test_null_columns_of_a_table_are_omitted(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "t", "margin": 1.0}, {"text": "u"}]).to_parquet(tmp_path / "r.parquet")
    assert [row for _, row in open_source(str(tmp_path / "r.parquet"))] == [{"text": "t", "margin": 1.0}, {"text": "u"}]
