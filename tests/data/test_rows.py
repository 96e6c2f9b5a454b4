"""Row formats: the record of each accepted row, and an error with file, line and column for each invalid one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.data.rows.formats import (
    read_labelled_row,
    read_preference_row,
    read_prompt_row,
    read_ptx_row,
    read_sft_row,
)
from hybrid_rlhf.data.rows.sources import open_source
from tests.support.errors import user_error
from tests.support.messages import assistant, user

USER, ANSWER, OTHER = user("q"), assistant("a"), assistant("b")
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
    assert read_sft_row("f:1", row).messages == messages


def test_text_rows() -> None:
    assert read_sft_row("f:1", {"text": "plain"}).text == "plain"
    assert read_ptx_row("f:1", {"text": "plain"}).text == "plain"
    assert read_ptx_row("f:1", {"prompt": "q", "completion": "a"}).messages == [USER, ANSWER]


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
    record = read_preference_row("f:1", {**row, "margin": 2})
    assert (record.prompt, record.completions) == ([USER], [[ANSWER], [OTHER]])
    assert (record.pairs, record.margins) == ([(0, 1)], [2.0])
    assert read_preference_row("f:1", row).margins == [0.0]


def test_ranked_lists_become_all_their_pairs() -> None:
    record = read_preference_row("f:1", {"prompt": "q", "responses": ["a", "b", "c", "d"], "ranks": [2, 1, 2, 3]})
    assert sorted(record.pairs) == [(0, 3), (1, 0), (1, 2), (1, 3), (2, 3)]  # equal ranks make no pair
    assert len(record.margins) == 5
    whole = {"prompt": [USER], "responses": [[USER, ANSWER], [USER, OTHER]], "ranks": [1, 2]}
    assert read_preference_row("f:1", whole).completions == [[ANSWER], [OTHER]], (
        "a repeated prompt is not part of the completion"
    )


def test_labelled_rows() -> None:
    """Labels of spreadsheets are text."""
    for label, desirable in ((True, True), (0, False), ("True", True), ("FALSE", False)):
        for row in ({"prompt": "q", "completion": "a"}, {"messages": [USER, ANSWER]}):
            record = read_labelled_row("f:1", {**row, "label": label})
            assert (record.prompt, record.completions, record.labels) == ([USER], [[ANSWER]], [desirable])
    with user_error("column 'label' must be true .* got 'good'"):
        read_labelled_row("f:1", {"messages": [USER, ANSWER], "label": "good"})


def test_prompt_rows() -> None:
    assert read_prompt_row("f:1", {"prompt": "q", "answer": 4}).columns == {"answer": 4}
    assert read_prompt_row("f:1", {"prompt": "q"}).messages == [USER]
    assert read_prompt_row("f:1", {"messages": [SYSTEM, USER, ANSWER], "id": 1}).messages == [SYSTEM, USER]
    assert read_prompt_row("f:1", {"messages": [USER]}).messages == [USER]


SFT_FORMATS = r"messages or prompt \+ completion or prompt \+ chosen or text"
PAIR_FORMATS = r"prompt \+ chosen \+ rejected or prompt \+ responses \+ ranks"
GOOD = {"prompt": "q", "completion": "a", "chosen": "a", "rejected": "b"}
BAD_ROWS: dict[Callable[..., Any], list[tuple[dict[str, Any], str]]] = {
    read_sft_row: [
        ({}, f"{SFT_FORMATS}, got columns none"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "got the format sharegpt: convert it with"),
        ({"messages": [USER]}, "assistant turn, got none"),
        ({"messages": []}, "column 'messages' .* got an empty list"),
        (
            {"messages": [{"role": "user"}]},
            "column 'messages': a message must have a 'content' other than null, got {'role': 'user'}",
        ),
        (
            {"messages": [{"role": "bot", "content": "x"}, ANSWER]},
            "column 'messages': a role .* developer, user, assistant, tool, function, ipython, observation, got 'bot'",
        ),
        (
            {"prompt": "q", "completion": [{"role": "assistant", "content": 3}]},
            "column 'completion': the content of a message .* got 3",
        ),
        ({"prompt": "q", "completion": " \n"}, r"column 'completion' must not be empty, got ' \\n'"),
        ({"prompt": 3, "completion": "a"}, "column 'prompt' .* got int"),
        ({"text": 3}, "column 'text' must be text, got int"),
        ({"messages": [USER, {**ANSWER, "weight": True}]}, "column 'messages': the weight .* 0 or 1, got True"),
        ({"messages": [{**USER, "weight": 0}, ANSWER]}, "only assistant turns have a weight, got 0 .* user"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "turn of weight 1, got weight 0 for each"),
        (
            {"messages": [USER, ANSWER], "label": False},
            "for SFT must have no label of its answer, got column 'label' False",
        ),
        ({"messages": [USER, ANSWER], "rejected_response": "b"}, "no rejected answer, got column 'rejected_response'"),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, r"must be text, got column 'images' with \['a.png'\]"),
    ],
    read_preference_row: [
        ({"instruction": "q", "output": "a"}, "got the format alpaca: convert it with"),
        ({"prompt": "q", "chosen": "a"}, f"{PAIR_FORMATS}, got columns chosen, prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' must differ, both are 'a'"),
        ({"prompt": "q", "chosen": "a", "rejected": 3}, "column 'rejected' .* got int"),
        ({"chosen": [USER, ANSWER], "rejected": "c"}, "with text need a prompt, got none: add it, convert"),
        ({**GOOD, "margin": "1"}, "column 'margin' .* number, got '1'"),
        ({**GOOD, "margin": True}, "column 'margin' .* number, got True"),
        ({"chosen": [USER], "rejected": [USER, ANSWER]}, "'chosen' .* assistant turn, got nothing"),
        ({"prompt": "q", "responses": ["a"], "ranks": [1, 2]}, "'responses' and 'ranks' .* 1 and 2"),
        ({"prompt": "q", "responses": "ab", "ranks": [1, 2]}, "'responses' and 'ranks' .* str and 2"),
        ({"responses": ["a", "b"], "ranks": [1, 2]}, r"prompt \+ responses \+ ranks, got columns ranks, responses"),
        ({"prompt": "q", "responses": ["a", "b"], "ranks": [1, 1]}, r"'ranks' .* different ranks, got \[1, 1\]"),
        ({"prompt": "q", "responses": ["a", "a"], "ranks": [1, 2]}, "'responses' .* got 'a' twice"),
        ({"prompt": "q", "responses": ["a", "b"], "ranks": [1, "2"]}, r"column 'ranks' .* numbers, got \[1, '2'\]"),
        (
            {"prompt": "q", "chosen": [{**ANSWER, "weight": 0}], "rejected": "b"},
            "column 'chosen' must end with an assistant turn of weight 1, got weight 0",
        ),
    ],
    read_prompt_row: [
        ({"text": "x"}, "prompt or messages, got columns text: rename or add columns"),
        ({"promt": "x"}, "prompt or messages, got columns promt: rename promt to prompt"),
        ({"messages": [ANSWER]}, "column 'messages' must have a prompt, got only an assistant turn"),
    ],
}


@pytest.mark.parametrize(
    ("adapter", "row", "rule"), [(reader, *case) for reader, cases in BAD_ROWS.items() for case in cases]
)
def test_an_invalid_row_is_named_by_file_line_and_column(
    adapter: Callable[..., Any], row: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    """The invalid row is in line 3, after a valid one and a blank line."""
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(row)}\n")
    with user_error(rule) as caught:
        [adapter(location, row) for location, row in open_source(str(file))]
    line = str(caught.value)
    assert line.startswith(f"{file}:3: ") and "\n" not in line
    assert line.endswith(
        (
            *(": fix the row", "remove the row", "rename or add columns", ": remove one", "remove it", "data convert"),
            "remove the column",
            "rename promt to prompt",
        )
    )


def test_a_prompt_column_takes_precedence_over_messages() -> None:
    record = read_prompt_row("f:1", {"prompt": "q", "messages": [USER, ANSWER]})
    assert record.messages == [USER] and record.columns == {"messages": [USER, ANSWER]}


@pytest.mark.parametrize(("key", "value"), [("train", False), ("training", False), ("loss", False), ("loss_weight", 0)])
def test_turns_that_are_marked_as_not_to_be_learned_have_weight_0(key: str, value: object) -> None:
    """A false value counted as empty, so that the turn was learned."""
    row = {"messages": [{**USER, key: False}, {**ANSWER, key: value}, USER, {**OTHER, key: not value}]}
    assert read_sft_row("f:1", row).messages == [USER, {**ANSWER, "weight": 0}, USER, OTHER]
    with user_error("column 'chosen' must end with an assistant turn of weight 1, got weight 0"):
        read_preference_row("f:1", {"prompt": "q", "chosen": [{**ANSWER, key: value}], "rejected": "b"})
    for turns, problem in (
        ([USER, {**ANSWER, key: 0.5}], f"column 'messages': '{key}' must be true or false, got 0.5"),
        ([USER, {**ANSWER, key: "false"}], f"'{key}' must be true or false, got 'false'"),
        ([{**USER, key: True}, ANSWER], f"only assistant turns have loss .'{key}'., got True for a turn of the user"),
        ([USER, {**ANSWER, key: value, "weight": 1}], "keys of a turn's loss must agree"),
    ):
        with user_error(problem):
            read_sft_row("f:1", {"messages": turns})


def test_a_prompt_beside_whole_conversations_is_read_once() -> None:
    """Only an exact beginning was removed: otherwise the question stood twice in the row."""
    rest = [assistant("c"), user("r")]
    whole = [SYSTEM, USER, *rest]
    pairs: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({"prompt": "q", "chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, OTHER]}, [SYSTEM, USER]),
        ({"prompt": "r", "chosen": [*whole, ANSWER], "rejected": [*whole, OTHER]}, whole),
        ({"prompt": "q", "chosen": [USER, *rest, ANSWER], "rejected": [USER, *rest, OTHER]}, [USER, *rest]),
        ({"prompt": "q \n", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, [USER]),
        ({"prompt": [{**USER, "id": 7}], "chosen": [USER, ANSWER], "rejected": "b"}, [{**USER, "id": 7}]),
        ({"prompt": [SYSTEM, USER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, [SYSTEM, USER]),
        ({"chosen": [{**USER, "id": 1}, ANSWER], "rejected": [{**USER, "id": 2}, OTHER]}, [{**USER, "id": 1}]),
    ]
    for row, prompt in pairs:
        record = read_preference_row("f:1", row)
        assert (record.prompt, record.completions) == (prompt, [[ANSWER], [OTHER]])
    ranked = {"prompt": "r", "responses": [[*whole, ANSWER], [*whole, OTHER]], "ranks": [1, 2]}
    assert read_preference_row("f:1", ranked) == read_preference_row("f:1", {**ranked, "prompt": whole})
    for prompt in ("q", "r"):
        assert read_sft_row("f:1", {"prompt": prompt, "completion": [*whole, ANSWER]}).messages == [*whole, ANSWER]
    labelled = read_labelled_row("f:1", {"prompt": "r", "completion": [*whole, ANSWER], "label": True})
    assert (labelled.prompt, labelled.completions) == (whole, [[ANSWER]])
    more = {"prompt": [USER, ANSWER], "chosen": [user("s"), ANSWER], "rejected": [user("s"), OTHER]}
    assert read_preference_row("f:1", more).prompt == [USER, ANSWER], "a conversation may go on"


@pytest.mark.parametrize(
    "completion",
    [
        [user("other"), ANSWER],
        [SYSTEM, user("other"), ANSWER],
        [OTHER, USER, ANSWER],
        [SYSTEM, ANSWER],
    ],
)
def test_a_completion_that_may_repeat_the_prompt_is_refused(completion: list[dict[str, Any]]) -> None:
    for reader, row in (
        (read_sft_row, {"completion": completion}),
        (read_labelled_row, {"completion": completion, "label": False}),
        (read_preference_row, {"chosen": completion, "rejected": "b"}),
        (read_preference_row, {"responses": [completion, "b"], "ranks": [1, 2]}),
    ):
        with user_error("f:1: column '[a-z]*' must be the completion alone, or a conversation that repeats the prompt"):
            reader("f:1", {"prompt": "q", **row})
    with user_error("differ|repeats the prompt"):
        read_sft_row("f:1", {"prompt": [SYSTEM, USER], "completion": [{**SYSTEM, "content": "x"}, USER, ANSWER]})


def calls_of(*ids: str | None) -> dict[str, Any]:
    functions = ({"name": name, "arguments": {}} for name in ("sky", "sea", "sun"))
    calls = [
        {"type": "function", "function": function} | ({"id": identity} if identity else {})
        for identity, function in zip(ids, functions, strict=False)
    ]
    return {"role": "assistant", "tool_calls": calls}


def result_of(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "tool", **keys, "content": content}


def test_results_are_in_the_order_of_their_calls() -> None:
    """With the names of the calls. They stayed in their order of arrival, by which templates pair them with calls."""

    def ordered(call: dict[str, Any], *results: dict[str, Any]) -> list[str]:
        row = {"messages": [USER, call, *results, ANSWER]}
        return [f"{message.get('name')} {message['content']}" for message in read_sft_row("f:1", row).messages[2:-1]]

    a, b, c = (result_of(name, tool_call_id=name) for name in "abc")
    assert ordered(calls_of("a", "b", "c"), c, a, b) == ["sky a", "sea b", "sun c"]
    assert ordered(calls_of("a", "b"), b) == ["sea b"], "the first has none"
    assert ordered(calls_of("a", None), result_of("x"), a) == ["sky a", "sea x"], "one is left"
    assert ordered(calls_of(None, None), result_of("x"), result_of("y")) == ["sky x", "sea y"]
    assert ordered(calls_of(None, None), result_of("y", name="sea"), result_of("x", name="sky")) == ["sky x", "sea y"]
    assert ordered(calls_of(None, None), result_of("both")) == ["None both"], "ShareGPT's observation of all calls"
    assert ordered(calls_of(None), result_of("x", name="other", tool_call_id="z")) == ["other x"]
    for call, results in (
        (calls_of("a", "b"), [a, result_of("x", tool_call_id="z")]),
        (calls_of("a", "b"), [a, a]),
        (calls_of("a", "a"), [a, a]),
        (calls_of(None, None, None), [result_of("x"), result_of("y")]),
        (calls_of(None), [result_of("x"), result_of("y")]),
        (calls_of("a", "b", "c"), [a, result_of("x")]),
    ):
        with user_error("f:1: column 'messages': each result of a turn's tool calls must have the 'tool_call_id'"):
            ordered(call, *results)
