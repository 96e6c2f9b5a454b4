"""Published formats, in the shapes in which they are distributed, become rows that the readers of the steps accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.configs.commands.data import FormatName, RankedAs
from hybrid_rlhf.data.preparation.conversion.converting import CONVERSIONS, ConversionReport, checked, convert
from hybrid_rlhf.data.preparation.conversion.dialogues import dialogue_pair
from hybrid_rlhf.data.preparation.conversion.tool_calls import with_tool_calls
from hybrid_rlhf.data.preparation.conversion.turns import query_row, sharegpt_row
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import read_preference_row, read_sft_row
from hybrid_rlhf.data.rows.problems import RowProblems
from hybrid_rlhf.data.rows.sources import open_source
from tests.support.errors import user_error
from tests.support.messages import assistant, user

Write = Callable[..., Path]
DIALOGUE = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}


def converted(
    file: Path, *, ranked_as: RankedAs = "ranks", skip_bad: bool = False
) -> tuple[list[Row], ConversionReport]:
    """The rows of a converted file, and what was reported."""
    output = file.with_suffix(".out.jsonl")
    report = convert(str(file), output, format="auto", ranked_as=ranked_as, skip_bad=skip_bad)
    rows = [row for _, row in open_source(str(output))] if output.exists() else []
    return rows, report


def test_continuations_of_a_dialogue_become_pairs(write_jsonl: Write) -> None:
    """Dahoas/rm-static: the labels are in the column `prompt` only."""
    prompt = "\n\nHuman: What is a crumpet?\n\nAssistant: A kind of bread.\n\nHuman: Sweet?\n\nAssistant:"
    row = {"prompt": prompt, "response": " No.", "chosen": " No.", "rejected": " Yes.\n\nHuman: Yes?\n\nAssistant: No."}
    rows, report = converted(write_jsonl([row]))
    assert (report.format, report.written) == ("hh", 1)
    assert rows == [
        {
            "prompt": [user("What is a crumpet?"), assistant("A kind of bread."), user("Sweet?")],
            "chosen": [assistant("No.")],
            "rejected": [assistant("Yes."), user("Yes?"), assistant("No.")],
        }
    ]


ALPACA = {"instruction": "q", "input": "", "output": "a"}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
OPENAI = {"messages": [user("q"), assistant("a")]}
LABELLED = {"prompt": [user("q")], "completion": [assistant("a")]}
PAIR = {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}


@pytest.mark.parametrize("row", [ALPACA, SHAREGPT, OPENAI])
def test_labels_and_rejected_answers_are_kept(row: Row, write_jsonl: Write) -> None:
    """As conversations for SFT, undesirable answers would be learned."""
    for columns, expected in (
        ({"kto_tag": False}, {**LABELLED, "label": False}),
        ({"label": True}, {**LABELLED, "label": True}),
        ({"kto_tag": "False"}, {**LABELLED, "label": False}),
        ({"rejected_response": "b"}, PAIR),
        ({"rejected_messages": [user("q"), assistant("b")]}, PAIR),
        ({"label": None, "rejected_response": None}, OPENAI),
    ):
        rows, report = converted(write_jsonl([{**row, **columns}]))
        assert (rows, report.problems.texts) == ([expected], [])
    for columns, problem in (
        ({"kto_tag": "maybe"}, "column 'kto_tag' must be true or false, got 'maybe'"),
        ({"images": ["x.png"]}, "a row must be text, got column 'images'"),
        ({"label": 1, "rejected_response": "b"}, "a label or a rejected answer, got label True"),
    ):
        rows, report = converted(write_jsonl([{**row, **columns}]), skip_bad=False)
        assert len(report.problems.texts) == 1 and problem in report.problems.texts[0]


def test_helpsteer_and_nectar_become_ranked_answers_and_pairs(write_jsonl: Write) -> None:
    rated = [
        {"prompt": "q", "response": text, "helpfulness": score, "correctness": 4}
        for text, score in (("a", 4), ("b", 1))
    ]
    several = "q\n<extra_id_1>Assistant\nr\n<extra_id_1>User\ns\n<extra_id_1>Assistant\n"
    ranked = {"prompt": [user("q")], "responses": [[assistant("a")], [assistant("b")]], "ranks": [1.0, 2.0]}
    assert converted(write_jsonl(rated))[0] == [ranked]
    rated = [{**row, "prompt": several} for row in rated]
    assert converted(write_jsonl(rated))[0] == [{**ranked, "prompt": [user("q"), assistant("r"), user("s")]}]
    answers = [{"answer": "b", "rank": 2.0, "model": "m"}, {"answer": "a", "rank": 1.0, "model": "n"}]
    nectar = {"prompt": "\n\nHuman: q\n\nAssistant: ", "answers": answers, "turns": 1}
    assert converted(write_jsonl([nectar]), ranked_as="pairs")[0] == [PAIR]
    context = {"context": [user("q")], "domain": "code"}
    preferred = [
        {**context, "response1": "a", "response2": "b", "overall_preference": -2},
        {**context, "response1": "b", "response2": "a", "overall_preference": 1},
    ]
    assert converted(write_jsonl(preferred))[0] == [PAIR, PAIR]
    pairs = [{"prompt": "q", "response_1": "a", "response_2": "b", "preference_strength": -1}]
    assert converted(write_jsonl(pairs))[0] == [PAIR]
    equal = [{**context, "response1": "a", "response2": "b", "overall_preference": 0}]
    assert "a pair needs a preference" in converted(write_jsonl(equal))[1].problems.texts[0]


@pytest.mark.parametrize("prompt", ["\n\nHuman: Sweet?", "Sweet?\n\nAssistant:", "Sweet?"])
def test_a_prompt_that_the_assistant_does_not_answer_is_no_dialogue(write_jsonl: Write, prompt: str) -> None:
    with user_error("one of the formats hh, sharegpt.*got columns chosen, prompt, rejected"):
        converted(write_jsonl([{"prompt": prompt, "chosen": "No.", "rejected": "Yes."}]))


def test_sharegpt_turns_with_calls_become_messages(write_jsonl: Write) -> None:
    tool = {"name": "weather", "description": "now", "parameters": {"type": "object", "properties": {}}}
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    row = {
        "conversations": [
            {"from": "human", "value": "weather in Paris?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": '{"sky": "clear"}'},
            {"from": "gpt", "value": "It is clear."},
        ],
        "system": "Be brief.",
        "tools": json.dumps([tool]),
    }
    (found,), report = converted(write_jsonl([row]))
    assert report.format == "sharegpt"
    assert found["tools"] == [{"type": "function", "function": tool}]
    assert [m["role"] for m in found["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert found["messages"][2]["tool_calls"] == [{"type": "function", "function": call}]
    assert found["messages"][3] == {"role": "tool", "name": "weather", "content": '{"sky": "clear"}'}


@pytest.mark.parametrize(
    ("first", "row", "problem"),
    [
        ({"instruction": "q", "output": "a"}, {"instruction": "q"}, "column 'output' must be text, got none"),
        (
            DIALOGUE,
            {**DIALOGUE, "rejected": "\n\nHuman: x\n\nAssistant: c"},
            "columns 'chosen' and 'rejected' must begin with the same turn, the prompt, got 'a' and 'x'",
        ),
        (
            DIALOGUE,
            {**DIALOGUE, "rejected": DIALOGUE["chosen"]},
            "columns 'chosen' and 'rejected' must differ, both are ",
        ),
        (
            DIALOGUE,
            {"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: a\n\nAssistant: b"},
            "column 'chosen' must have a turn after those that 'chosen' and 'rejected' share, got none",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            {"conversations": [{"from": "gpt", "value": "a"}]},
            "column 'conversations' must have a turn of the user, got gpt",
        ),
    ],
)
def test_the_problem_of_a_row_names_its_own_column(write_jsonl: Write, first: Row, row: Row, problem: str) -> None:
    """Messages named columns that the row cannot have ('prompt', 'chosen'), and a lone answer was accepted."""
    file = write_jsonl([first, row])
    _, report = converted(file)
    assert report.problems.count == 1 and report.problems.texts[0].startswith(f"{file}:2: {problem}")


def test_weights_of_turns_are_kept(write_jsonl: Write) -> None:
    """ShareGPT data with weights became rows that are trained on whole."""
    turns: list[dict[str, Any]] = [
        {"from": "human", "value": "q", "weight": 0},
        {"from": "gpt", "value": "a", "weight": 0},
        {"from": "human", "value": "r", "weight": None},
        {"from": "gpt", "value": "b", "weight": 1},
    ]
    messages = [user("q"), {**assistant("a"), "weight": 0}, user("r"), assistant("b")]
    assert converted(write_jsonl([{"conversations": turns}]))[0] == [{"messages": messages}]
    assert converted(write_jsonl([{"messages": messages}]))[0] == [{"messages": messages}]
    turns[1]["weight"] = 0.5
    _, report = converted(write_jsonl([{"conversations": turns}]))
    assert "the weight of a turn must be 0 or 1, got 0.5" in report.problems.texts[0]


def test_all_keys_of_a_turn_of_sharegpt_are_kept(write_jsonl: Write) -> None:
    """All keys but the weight were dropped: turns with `train: false` were learned, and their reasoning was lost."""
    said = {"from": "gpt", "value": "a", "train": False, "reasoning_content": "because"}
    turns = [{"from": "human", "value": "q", "train": False}, said, {"from": "gpt", "value": "b", "loss": True}]
    first = {**assistant("a"), "weight": 0, "reasoning_content": "because"}
    assert converted(write_jsonl([{"conversations": turns}]))[0] == [{"messages": [user("q"), first, assistant("b")]}]
    messages = [user("q"), {**assistant("a"), "train": False}, assistant("b")]
    assert converted(write_jsonl([{"messages": messages}]))[0][0]["messages"][1] == {**assistant("a"), "weight": 0}
    said["train"] = "no"
    _, report = converted(write_jsonl([{"conversations": turns}]))
    assert "'train' must be true or false, got 'no'" in report.problems.texts[0]


def test_pairs_of_sharegpt_alpaca_and_openai(write_jsonl: Write) -> None:
    formats: dict[str, Row] = {
        "sharegpt": {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        "alpaca": {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        "openai_messages": {
            "input": {"messages": [user("q")], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [assistant("a")],
            "non_preferred_output": [assistant("b")],
        },
    }
    for name, row in formats.items():
        rows, report = converted(write_jsonl([row], f"{name}.jsonl"))
        assert rows == [{"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}]
        assert report.format == name


def test_alpaca_rows_keep_history_and_input(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Again", "input": "", "output": "4", "system": "You add.", "history": [["1 and 1", "2"]]},
    ]
    file = tmp_path / "alpaca.json"  # as it is distributed: one list
    file.write_text(json.dumps(rows))
    found, report = converted(file)
    assert report.format == "alpaca"
    assert found[0]["messages"] == [user("Add.\n1 and 2"), assistant("3")]
    history = [user("1 and 1"), assistant("2")]
    assert found[1]["messages"] == [{"role": "system", "content": "You add."}, *history, user("Again"), assistant("4")]


def tree_message(name: str, parent: str | None, text: str, rank: int | None = None, **more: Any) -> Row:
    """A row of oasst1."""
    role = "assistant" if name.startswith("a") else "prompter"
    return {"message_id": name, "parent_id": parent, "text": text, "role": role, "rank": rank, "lang": "en", **more}


TREE = [
    tree_message("a2", "p1", "worse", 1),  # before its parent, as rows may be in any order
    tree_message("p1", None, "question"),
    tree_message("a1", "p1", "better", 0),
    tree_message("a3", "p1", "spam", 2, deleted=True),
    tree_message("p2", "a1", "and then?", None),
    tree_message("a4", "p2", "this", None),
    tree_message("p3", "a2", "why?", None),
    tree_message("a5", "p3", "so", None),
]


def test_trees_become_ranked_answers_or_the_best_conversations(write_jsonl: Write) -> None:
    file = write_jsonl(TREE)
    rows, report = converted(file)
    assert (report.format, report.rows) == ("openassistant", len(TREE))
    assert rows == [
        {"prompt": [user("question")], "responses": [[assistant("better")], [assistant("worse")]], "ranks": [0.0, 1.0]}
    ]
    best = [user("question"), assistant("better"), user("and then?"), assistant("this")]
    file.with_suffix(".out.jsonl").unlink()
    assert converted(file, ranked_as="messages")[0] == [{"messages": best}]


def test_a_tree_in_one_row_is_the_same(write_jsonl: Write) -> None:
    flat, _ = converted(write_jsonl(TREE, "flat.jsonl"))
    by_parent: dict[str | None, list[Row]] = {}
    for message in TREE:
        by_parent.setdefault(message["parent_id"], []).append(message)

    def nested(message: Row) -> Row:
        own = {key: value for key, value in message.items() if key != "parent_id"}
        return own | {"replies": [nested(reply) for reply in by_parent.get(message["message_id"], [])]}

    root = nested(by_parent[None][0])
    tree = {"message_tree_id": "p1", "tree_state": "ready_for_export", "prompt": root}
    rows, report = converted(write_jsonl([tree], "nested.jsonl"))
    assert rows == flat and report.format == "openassistant"


def test_a_row_with_a_bad_message_is_skipped_whole(write_jsonl: Write) -> None:
    """The ranked answers that precede the bad message in its tree were written."""
    answers = [tree_message(f"a9{rank}", "p9", f"answer {rank}", rank) for rank in range(2)]
    answers[1] |= {"replies": [tree_message("p9", "a91", "taken")]}
    tree = {"prompt": tree_message("p9", None, "another question") | {"replies": answers}}
    file = write_jsonl([tree, *TREE])
    assert converted(file)[1].problems.texts[0].startswith(f"{file}:1: a message has a 'message_id' of its own")
    assert converted(file, skip_bad=True)[0] == converted(write_jsonl(TREE, "alone.jsonl"))[0]


def test_a_message_outside_of_a_tree_is_a_problem(write_jsonl: Write) -> None:
    circle = [tree_message("p8", "a8", "round"), tree_message("a8", "p8", "and round")]
    file = write_jsonl([*TREE, tree_message("a9", "gone", "lost", 0), *circle])
    rows, report = converted(file)
    assert rows == [] and report.problems.texts == [
        f"{file}:{len(TREE) + number}: the parent {parent!r} is in no tree: add it"
        for number, parent in enumerate(("gone", "a8", "p8"), start=1)
    ]
    assert len(converted(file, skip_bad=True)[0]) == 1


def feedback(text: str, score: Any = None, rating: str | None = None) -> Row:
    """A completion of UltraFeedback."""
    ratings = {name: {"Rating": rating, "Rationale": "..."} for name in ("helpfulness", "honesty")}
    scores = {} if score is None else {"overall_score": score, "fine-grained_score": 1.0}
    return {"model": "m", "response": text, "annotations": ratings if rating else {}, **scores}


@pytest.mark.parametrize(
    ("ranked_as", "row"),
    [
        (
            "ranks",
            {"prompt": [user("q")], "responses": [[assistant(t)] for t in "abc"], "ranks": [2.0, 1.0, 3.0]},
        ),
        ("pairs", {"prompt": [user("q")], "chosen": [assistant("b")], "rejected": [assistant("c")]}),
        ("messages", {"messages": [user("q"), assistant("b")]}),
    ],
)
def test_scores_become_ranks_a_pair_or_a_conversation(ranked_as: RankedAs, row: Row, write_jsonl: Write) -> None:
    completions = [feedback("a", 6.5), feedback("b", 8.0), feedback("c", rating="2")]
    file = write_jsonl([{"source": "x", "instruction": "q", "completions": completions}])
    rows, report = converted(file, ranked_as=ranked_as)
    assert rows == [row] and report.format == "ultrafeedback"


def test_equal_scores_and_missing_ones_are_problems(write_jsonl: Write) -> None:
    equal = {"instruction": "q", "completions": [feedback("a", 7), feedback("b", 7)]}
    missing = {"instruction": "q", "completions": [feedback("a", 7), feedback("b", rating="N/A")]}
    file = write_jsonl([equal, missing])
    for ranked_as in ("ranks", "pairs"):
        rows, report = converted(file, ranked_as=ranked_as)  # type: ignore[arg-type]
        assert rows == [] and report.problems.count == 2
        assert f"{file}:1: " in report.problems.texts[0] and "two different ranks" in report.problems.texts[0]
        assert report.problems.texts[1].startswith(f"{file}:2: completion 2 must have a score")


def test_comparisons_of_summaries_and_answers(write_jsonl: Write) -> None:
    summaries = {
        "info": {"id": "t3", "post": "My cat sleeps.", "title": "Cat", "subreddit": "aww"},
        "summaries": [{"text": " one", "policy": "sup2"}, {"text": " two", "policy": "ref"}],
        "choice": 1,
        "worker": "w",
    }
    (row,), report = converted(write_jsonl([summaries], "summaries.jsonl"))
    assert report.format == "openai_comparisons"
    assert row["prompt"] == [user("SUBREDDIT: r/aww\n\nTITLE: Cat\n\nPOST: My cat sleeps.\n\nTL;DR:")]
    assert (row["chosen"], row["rejected"]) == ([assistant("two")], [assistant("one")])
    answers = {"question": {"full_text": "q"}, "answer_0": "a", "answer_1": "b", "score_0": 0.5, "score_1": -0.5}
    (row,), _ = converted(write_jsonl([answers], "answers.jsonl"))
    assert (row["chosen"], row["rejected"]) == ([assistant("a")], [assistant("b")])


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}


@pytest.mark.parametrize(
    "turn",
    [
        {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}]},
        {"function_call": {"name": "look", "arguments": '{"at": "sky"}'}},
        {"content": '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'},
        {"content": "<tool_call>\n{'arguments': {'at': 'sky'}, 'name': 'look'}\n</tool_call>"},
    ],
    ids=["openai", "function_call", "hermes", "hermes with Python's quotes"],
)
@pytest.mark.parametrize("result", [{"role": "tool", "content": "blue"}, {"role": "function", "content": "blue"}])
def test_calls_of_all_styles_become_one(turn: Row, result: Row, write_jsonl: Write) -> None:
    row = {"messages": [user("sky?"), {"role": "assistant", **turn}, result, assistant("Blue.")]}
    (found,), report = converted(write_jsonl([row]))
    assert report.format == "openai_messages"
    (call,) = found["messages"][1]["tool_calls"]
    assert {key: call[key] for key in ("type", "function")} == CALL
    assert "content" not in found["messages"][1] and "function_call" not in found["messages"][1]
    assert found["messages"][2] == {"role": "tool", "name": "look", "content": "blue"}


def test_several_calls_and_results_in_one_text() -> None:
    calls = "".join(f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>' for i in (1, 2))
    results = "<tool_response>one</tool_response><tool_response>two</tool_response>"
    turns = [assistant(f"Looking.\n{calls}"), {"role": "tool", "content": results}]
    said, first, second = with_tool_calls("f:1", turns)
    assert said["content"] == "Looking." and [c["function"]["name"] for c in said["tool_calls"]] == ["f1", "f2"]
    assert (first["name"], first["content"], second["name"], second["content"]) == ("f1", "one", "f2", "two")


def test_tools_that_the_system_prompt_lists_are_not_listed_twice(write_jsonl: Write) -> None:
    system = {"from": "system", "value": "You may call <tools>[...]</tools>"}
    turns = [system, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    (row,), _ = converted(write_jsonl([{"conversations": turns, "tools": '[{"name": "look"}]'}]))
    assert "tools" not in row


BAD = [
    ({"conversations": [{"from": "alien", "value": "x"}]}, "'from' must be one of human"),
    ({"conversations": [{"from": "human", "value": "x"}]}, "must have an assistant turn"),
    ({"conversations": [{"from": "function_call", "value": "not json"}]}, "must be JSON"),
    ({"conversations": "text"}, "column 'conversations' must be a list of turns, got str"),
    ({"conversations": [{"from": "gpt", "value": "<tool_call>{}"}]}, "must end with </tool_call>"),
]


def test_each_bad_row_is_a_problem_with_its_line(write_jsonl: Write) -> None:
    good = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    file = write_jsonl([good, *(row for row, _ in BAD)])
    with file.open("a") as opened:
        opened.write("{broken\n")
    rows, report = converted(file)
    assert rows == [] and report.written == 0 and list(file.parent.iterdir()) == [file], "nothing is left behind"
    texts = sorted(report.problems.texts)
    assert len(texts) == len(BAD) + 1
    for number, (text, (_, reason)) in enumerate(zip(texts, BAD, strict=False), start=2):
        assert text.startswith(f"{file}:{number}: ") and reason in text
    assert texts[-1].startswith(f"{file}:{len(BAD) + 2}: a line must be JSON")
    rows, report = converted(file, skip_bad=True)
    assert rows == [{"messages": [user("q"), assistant("a")]}]
    assert (report.written, report.problems.count) == (1, len(BAD) + 1)


def test_the_output_stays_when_all_rows_are_bad(write_jsonl: Write, tmp_path: Path) -> None:
    file, output = write_jsonl([{"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: a"}]), tmp_path / "old.jsonl"
    output.write_text("mine\n")
    with user_error("must have a row"):
        convert(str(file), output, format="hh", ranked_as="ranks", skip_bad=True)
    assert output.read_text() == "mine\n"


# Texts as people write them, without what the formats use as marks.
texts = (
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)
    .map(str.strip)
    .filter(lambda text: text and not any(mark in text for mark in ("Human:", "Assistant:", "<tool")))
)
rounds = st.lists(st.tuples(texts, texts), max_size=3)


@settings(deadline=None)
@given(rounds, texts, st.lists(texts, min_size=2, max_size=2, unique=True))
def test_any_dialogue_is_read_back(earlier: list[tuple[str, str]], last: str, answers: list[str]) -> None:
    prompt = [turn for asked, said in earlier for turn in (user(asked), assistant(said))] + [user(last)]
    names = {"user": "Human", "assistant": "Assistant"}
    written = "".join(f"\n\n{names[turn['role']]}: {turn['content']}" for turn in prompt)
    pair = {
        name: f"{written}\n\nAssistant: {answer}" for name, answer in zip(("chosen", "rejected"), answers, strict=True)
    }
    record = read_preference_row("f:1", dialogue_pair("f:1", pair))
    assert record.prompt == prompt
    assert record.completions == [[assistant(answer)] for answer in answers]


@settings(deadline=None)
@given(rounds, texts, texts)
def test_any_conversation_is_read_back(earlier: list[tuple[str, str]], last: str, answer: str) -> None:
    messages = [turn for asked, said in earlier for turn in (user(asked), assistant(said))]
    messages += [user(last), assistant(answer)]
    names = {"user": "human", "assistant": "gpt"}
    shared = {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in messages]}
    alpaca = {"instruction": last, "output": answer, "history": [list(each) for each in earlier]}
    for row in (sharegpt_row("f:1", shared), query_row("f:1", alpaca)):
        assert read_sft_row("f:1", row).messages == messages


EXAMPLES: dict[FormatName, Row] = {
    "hh": DIALOGUE,
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}], "system": "s", "tools": "[]", "chosen": {}},
    "alpaca": {"instruction": "q", "input": "i", "output": "a", "history": [["a", "b"]], "system": "s"},
    "ultrafeedback": {"instruction": "q", "completions": [feedback("a", 1), feedback("b", rating="2")]},
    "openassistant": tree_message("p1", None, "q"),
    "helpsteer2": {"prompt": "q", "response": "a", "helpfulness": 3},
    "helpsteer3": {"context": [user("q")], "response1": "a", "response2": "b", "overall_preference": -1},
    "nectar": {"prompt": "\n\nHuman: q\n\nAssistant: ", "answers": [{"answer": "a", "rank": 1.0}]},
    "openai_comparisons": {"info": {"article": "x"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 0},
    "openai_messages": {"messages": [user("q"), assistant("a")], "tools": [], "input": {}, "preferred_output": []},
    "query": {"query": "q", "response": "a", "history": [["a", "b"]], "system_prompt": "s", "label": True},
}
KEYS = [
    "role",
    "content",
    "from",
    "value",
    "tool_calls",
    "function_call",
    "tool_call",
    "type",
    "response",
    "annotations",
    "text",
    "replies",
]
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "{", "[1]", "text", "assistant", "tool_call", "tool_use"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(list(EXAMPLES)), data=st.data())
def test_any_value_of_any_column_is_converted_or_a_problem(name: FormatName, data: st.DataObject) -> None:
    row = dict(EXAMPLES[name])
    for column in data.draw(
        st.sets(st.sampled_from([*row, "prompt", "non_preferred_output", "messages", "chosen"]), min_size=1)
    ):
        row[column] = data.draw(anything)
    problems = RowProblems()
    for ranked_as in get_args(RankedAs):
        for location, record in CONVERSIONS[name]([("f:1", row)], ranked_as, problems):
            with problems.collected():
                checked(location, record, ranked_as)
    assert all(text.startswith("f:1: ") for text in problems.texts)
