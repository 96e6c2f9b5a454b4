"""The same rows are the same in every format: nulls, missing keys, empty lists, nested values, and values whose types
differ between rows."""

from __future__ import annotations

import csv
import datetime
import json
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from hybrid_rlhf.data.preparation.checking import check_source
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import read_preference_row, read_sft_row
from hybrid_rlhf.data.rows.sources import open_source
from hybrid_rlhf.loop.step import _sources
from tests.support.errors import user_error
from tests.support.messages import user

SCALARS = st.one_of(st.none(), st.integers(-9, 9), st.sampled_from(["", "x", "é"]), st.booleans())
"""Without text that is JSON, such as "7", which `datasets.Json` stores as its value."""
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=2)
    ),
    max_leaves=5,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["f", "g"])},
        optional={"arguments": st.none() | st.dictionaries(st.sampled_from(["a", "b"]), VALUES, max_size=2)},
    ).map(lambda function: {"type": "function", "function": function}),
    min_size=1,
    max_size=2,
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.sampled_from(["yes", "no"])},
    optional={"tool_calls": st.none() | CALLS, "name": st.none() | st.just("n")},
)
SCHEMAS = st.fixed_dictionaries(
    {"name": st.just("f")},
    optional={"parameters": st.none() | st.dictionaries(st.sampled_from(["a", "b"]), VALUES, max_size=2)},
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"messages": ANSWERS.map(lambda answer: [user("hi"), answer])},
        optional={"tools": st.none() | st.lists(SCHEMAS, max_size=2), "expected": VALUES, "prompt": st.none()},
    ),
    min_size=1,
    max_size=3,
)


def table_of(rows: list[Row]) -> datasets.Dataset:
    """With null for missing columns, since `from_list` has only the columns of the first row."""
    columns = {name: None for row in rows for name in row}
    try:
        return datasets.Dataset.from_list([columns | row for row in rows], on_mixed_types="use_json")
    except pyarrow.ArrowInvalid:  # of some nested lists with nulls, which datasets cannot write
        reject()


def sources_of(rows: list[Row], folder: Path) -> dict[str, str]:
    """The rows in every format; a stream of Arrow and a folder as `datasets` writes them."""
    table = table_of(rows)
    content = table.data.table
    (folder / "rows.json").write_text(json.dumps(rows))
    with pyarrow.ipc.new_stream(folder / "rows.arrow", content.schema) as writer:
        writer.write_table(content)
    pyarrow.parquet.write_table(content, folder / "rows.parquet")
    table.save_to_disk(folder / "saved")
    written = {name: str(folder / name) for name in ("rows.json", "rows.arrow", "rows.parquet", "saved")}
    in_memory = {"Dataset": table, "dicts": rows}
    return written | {kind: str(_sources(data, str(folder / "cache"))[0]) for kind, data in in_memory.items()}


def rows_of(source: str) -> str:
    """As JSON: 1, 1.0 and True are equal in Python, and are other tokens."""
    return json.dumps([row for _, row in open_source(source)], sort_keys=True)


def as_lines(rows: list[Row], folder: Path) -> str:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / "rows.jsonl")


@settings(max_examples=150, deadline=None)
@given(rows=ROWS)
def test_the_same_rows_are_the_same_in_every_format(rows: list[Row]) -> None:
    with tempfile.TemporaryDirectory() as name:
        expected = rows_of(as_lines(rows, Path(name)))
        for kind, source in sources_of(rows, Path(name)).items():
            assert rows_of(source) == expected, kind


def test_every_type_of_arrow_has_its_value(tmp_path: Path) -> None:
    """Dictionaries, maps, decimals, views, JSON and other extensions, each also inside lists and structs."""
    json_values = pyarrow.array(['{"a": [1, null]}', None, '"text"'], pyarrow.json_())
    maps = pyarrow.array([[("k", 1), ("n", None)], None, []], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    columns: dict[str, tuple[pyarrow.Array, list[Any]]] = {
        "json": (json_values, [{"a": [1, None]}, None, "text"]),
        "map": (maps, [{"k": 1}, None, {}]),
        "dictionary": (pyarrow.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
        "decimal": (
            pyarrow.array([Decimal("0.5"), None, Decimal("2.00")], pyarrow.decimal128(9, 2)),
            [0.5, None, 2.0],
        ),
        "whole": (pyarrow.array([Decimal(7), None, Decimal(0)], pyarrow.decimal128(9, 0)), [7, None, 0]),
        "bool8": (
            pyarrow.ExtensionArray.from_storage(pyarrow.bool8(), pyarrow.array([1, None, 0], pyarrow.int8())),
            [True, None, False],
        ),
    }
    arrays = {name: array for name, (array, _) in columns.items()}
    struct = pyarrow.StructArray.from_arrays(list(arrays.values()), list(arrays))
    lists = pyarrow.ListArray.from_arrays([0, 1, 2, 3], struct)
    content = pyarrow.table({**arrays, "struct": struct, "list": lists})
    plain = [
        {name: values[index] for name, (_, values) in columns.items() if values[index] is not None}
        for index in range(3)
    ]
    expected = [{**row, "struct": row, "list": [row]} for row in plain]
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", content.schema) as writer:
        writer.write_table(content)
    stored = content.drop_columns([]).cast(content.schema)
    pyarrow.parquet.write_table(stored, tmp_path / "rows.parquet")
    for name in ("file.arrow", "rows.parquet"):
        source = open_source(str(tmp_path / name))
        assert [row for _, row in source] == expected, name
        assert source.count() == 3


def test_a_map_with_a_repeated_key_is_refused(tmp_path: Path) -> None:
    """As an object of JSON is."""
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    pyarrow.parquet.write_table(
        pyarrow.table({"m": pyarrow.array([[("k", 1), ("k", 2)]], kind)}), tmp_path / "r.parquet"
    )
    with user_error("is not valid Parquet .a map has a key twice.: check the file"):
        list(open_source(str(tmp_path / "r.parquet")))


def test_values_of_python_that_json_lacks(tmp_path: Path) -> None:
    """pandas gives lists as arrays; their text would be trained on."""
    rows = [
        {"prompt": "q", "ids": np.array([1, 2]), "n": np.int64(3), "d": Decimal("0.5"), "at": datetime.date(2025, 8, 1)}
    ]
    ((_, row),) = open_source(_sources(rows, str(tmp_path))[0])
    assert row == {"prompt": "q", "ids": [1, 2], "n": 3, "d": 0.5, "at": "2025-08-01"}


def test_messages_may_be_json_text(tmp_path: Path) -> None:
    """Cells of CSV can be nothing else; text in another notation would be a prompt."""
    turns = [user("q"), {"role": "assistant", "content": "a"}]
    expected = {"prompt": turns[:1], "completion": turns[1:], "tools": [{"name": "f"}]}
    texts = {name: json.dumps(value) for name, value in expected.items()}
    with (tmp_path / "r.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerows([texts.keys(), texts.values()])
    for source in (str(tmp_path / "r.csv"), as_lines([texts], tmp_path)):
        ((location, row),) = open_source(source)
        read = read_sft_row(location, row)
        assert (read.messages, read.tools) == (turns, expected["tools"])
    ((_, row),) = open_source(as_lines([{"messages": json.dumps(turns)}], tmp_path))
    assert read_sft_row("f:1", row).messages == turns
    for text, problem in (
        (str(turns), "messages in the notation of Python"),
        (json.dumps({"messages": turns, "tools": []}), "an object with messages as text"),
    ):
        for written in ({"prompt": "q", "chosen": text, "rejected": "b"}, {"chosen": text, "rejected": "b"}):
            ((_, row),) = open_source(as_lines([written], tmp_path))
            with user_error(f"column 'chosen' must be text or messages, got {problem}"):
                read_preference_row("f:1", row)


def test_a_list_in_a_jsonl_file_is_named(tmp_path: Path) -> None:
    """One error, also of a check, which reports each line: all lines of a list over many would be wrong."""
    file = tmp_path / "r.jsonl"
    file.write_text('[{"text": "a"}]')
    with user_error("r.jsonl:1: .* fix the line, or rename the file to .json if it is one list"):
        list(open_source(str(file)))
    file.write_text("[\n{}\n]")
    with user_error("r.jsonl:1: a line must be JSON, the file is one list: rename it to .json"):
        check_source(str(file))
