"""From a file to a row: the whole line that answers each mistake, with its place. Adapters alone: test_rows.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.rows import preference_row, prompt_row, sft_row
from hybrid_rlhf.data.sources import open_source

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
GOOD = {"prompt": "q", "completion": "a", "chosen": "a", "rejected": "b"}
NEEDS_SFT = "a row needs messages or prompt + completion or prompt + chosen or text"
NEEDS_PAIR = "a row needs prompt + chosen + rejected or prompt + responses + ranks"


def read(adapter: Callable[..., Any], source: Path) -> list[Any]:
    return [adapter(place, row) for place, row in open_source(str(source))]


# The mistake stands on line 3: a good row, a blank line, and then the row.
ROW_MISTAKES = [
    (sft_row, {"prompt": "q"}, f"{NEEDS_SFT}, found columns prompt: rename or add them"),
    (sft_row, {}, f"{NEEDS_SFT}, found columns none: rename or add them"),
    (
        sft_row,
        {"messages": [USER]},
        "SFT learns from assistant turns, this conversation has none: add one or drop the row",
    ),
    (
        sft_row,
        {"messages": [{"role": "bot", "content": "x"}, ANSWER]},
        "column 'messages': a role is system, developer, user, assistant, tool, function, ipython, observation, "
        "got 'bot': fix the row",
    ),
    (
        sft_row,
        {"prompt": "q", "completion": [{"role": "assistant", "content": 3}]},
        "column 'completion': the content of a message is text, or a list of {'type': 'text', 'text'}, "
        "got 3: fix the row",
    ),
    (sft_row, {"text": " \n"}, "column 'text' is empty: fill it or drop the row"),
    (
        preference_row,
        {"prompt": "q", "rejected": "b"},
        f"{NEEDS_PAIR}, found columns prompt, rejected: rename or add them",
    ),
    (
        preference_row,
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        "columns 'chosen' and 'rejected' are equal: a pair needs a better answer, drop the row",
    ),
    (
        preference_row,
        {"prompt": "q", "chosen": "a", "rejected": 3},
        "column 'rejected' is text or a list of messages, got a int: mend the row",
    ),
    (preference_row, {**GOOD, "margin": "1"}, "column 'margin' is a number, got '1': mend the row"),
    (preference_row, {**GOOD, "margin": True}, "column 'margin' is a number, got True: mend the row"),
    (preference_row, {**GOOD, "margin": None}, "column 'margin' is a number, got None: mend the row"),
    (
        preference_row,
        {"prompt": "q", "responses": ["a", "b"], "ranks": [1]},
        "columns 'responses' and 'ranks' are lists of one length: mend the row",
    ),
    (
        preference_row,
        {"prompt": "q", "responses": "ab", "ranks": [1, 2]},
        "columns 'responses' and 'ranks' are lists of one length: mend the row",
    ),
    (
        preference_row,
        {"responses": ["a", "b"], "ranks": [1, 2]},
        "a row needs prompt + responses + ranks, found columns ranks, responses: rename or add them",
    ),
    (
        preference_row,
        {"prompt": "q", "responses": ["a", "b"], "ranks": [1, "2"]},
        "column 'ranks' holds numbers, got [1, '2']: mend the row",
    ),
    (prompt_row, {"completion": "a"}, "a row needs prompt or messages, found columns completion: rename or add them"),
    (prompt_row, {"messages": [ANSWER]}, "column 'messages' has only an answer: add the prompt or drop the row"),
]


@pytest.mark.parametrize(("adapter", "row", "rule"), ROW_MISTAKES)
def test_a_bad_row_is_named_by_file_line_and_column(
    adapter: Callable[..., Any], row: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(row)}\n")
    with pytest.raises(UserError) as caught:
        read(adapter, file)
    assert str(caught.value) == f"{file}:3: {rule}"


@pytest.mark.parametrize("kind", ["json", "parquet", "folder"])
def test_a_bad_row_of_a_table_is_named_by_its_number(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": " "}]
    source = tmp_path / ("rows" if kind == "folder" else f"rows.{kind}")
    if kind == "json":
        source.write_text(json.dumps(rows))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(source)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(source)
    with pytest.raises(UserError) as caught:
        read(sft_row, source)
    assert str(caught.value) == f"{source}: row 2: column 'completion' is empty: fill it or drop the row"


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_table_without_rows_is_refused(kind: str, tmp_path: Path) -> None:
    empty, source = datasets.Dataset.from_dict({"text": []}), tmp_path / f"rows.{kind}"
    if kind == "parquet":
        empty.to_parquet(source)
    else:
        empty.save_to_disk(source)
    with pytest.raises(UserError) as caught:
        open_source(str(source))
    assert str(caught.value) == f"a data source has rows, {source} is empty: check the path"


def test_columns_that_a_table_filled_with_null_are_not_there(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "t", "margin": 1.0}, {"text": "u"}]).to_parquet(tmp_path / "r.parquet")
    assert [row for _, row in open_source(str(tmp_path / "r.parquet"))] == [{"text": "t", "margin": 1.0}, {"text": "u"}]


def test_an_implicit_prompt_is_all_that_the_answers_share() -> None:
    first, second = {"role": "assistant", "content": "first"}, {"role": "user", "content": "and?"}
    other = {"role": "assistant", "content": "b"}
    shared = [USER, first, second]
    record = preference_row("f:1", {"chosen": [*shared, ANSWER], "rejected": [*shared, other]})
    assert (record.prompt, record.responses) == (shared, [[ANSWER], [other]])


def test_a_prompt_column_wins_over_messages_and_leaves_them_to_reward_functions() -> None:
    record = prompt_row("f:1", {"prompt": "q", "messages": [USER, ANSWER]})
    assert record.messages == [USER] and record.columns == {"messages": [USER, ANSWER]}
