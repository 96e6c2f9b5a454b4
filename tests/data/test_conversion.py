"""Published formats, in the shapes in which they are distributed, become rows that the readers of the steps accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.configs.commands.data import FormatName, RankedAs
from hybrid_rlhf.data.preparation.conversion.converting import CONVERSIONS, checked, convert
from hybrid_rlhf.data.preparation.conversion.dialogues import dialogue_pair
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import read_preference_row
from hybrid_rlhf.data.rows.problems import RowProblems
from tests.data.rows import Converted
from tests.support.errors import user_error
from tests.support.messages import assistant, user

Write = Callable[..., Path]
DIALOGUE = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}


def test_continuations_of_a_dialogue_become_pairs(converted: Converted) -> None:
    """Dahoas/rm-static: the labels are in the column `prompt` only."""
    prompt = "\n\nHuman: What is a crumpet?\n\nAssistant: A kind of bread.\n\nHuman: Sweet?\n\nAssistant:"
    row = {"prompt": prompt, "response": " No.", "chosen": " No.", "rejected": " Yes.\n\nHuman: Yes?\n\nAssistant: No."}
    rows, report = converted([row])
    assert (report.format, report.written) == ("hh", 1)
    assert rows == [
        {
            "prompt": [user("What is a crumpet?"), assistant("A kind of bread."), user("Sweet?")],
            "chosen": [assistant("No.")],
            "rejected": [assistant("Yes."), user("Yes?"), assistant("No.")],
        }
    ]


def test_images_are_kept(write_jsonl: Write, tmp_path: Path) -> None:
    """Rows of LLaMA-Factory, LLaVA and verl, whose paths are relative to the folder of the output."""
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(b"read by data check and training")
    first, second, third = (f"pictures/{number}.png" for number in range(3))
    asked = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A."}]
    answered = [user("<image>\nWhat?"), assistant("A.")]
    verl = {"prompt": [user("<image><image>q")], "images": [{"bytes": b"abc", "path": None}, {"path": third}]}
    cases: list[tuple[Row, Row]] = [
        ({"id": "7", "image": first, "conversations": asked}, {"messages": answered, "image": first}),
        ({"images": [second], "conversations": asked}, {"messages": answered, "images": [second]}),
        (
            {"images": [third], "instruction": "<image>q", "input": "", "output": "a"},
            {"messages": [user("<image>q"), assistant("a")], "images": [third]},
        ),
        (
            {
                "images": [third],
                "conversations": asked[:1],
                "chosen": asked[1],
                "rejected": {**asked[1], "value": "B."},
            },
            {"prompt": answered[:1], "chosen": answered[1:], "rejected": [assistant("B.")], "images": [third]},
        ),
        (
            {**verl, "data_source": "d", "reward_model": {"ground_truth": "4"}},
            {
                "prompt": [user("<image><image>q")],
                "images": [{"bytes": "data:;base64,YWJj"}, {"path": third}],
                "data_source": "d",
                "reward_model": {"ground_truth": "4"},
            },
        ),
    ]
    output = tmp_path / "out.jsonl"
    for number, (row, expected) in enumerate(cases):
        write = datasets.Dataset.from_list([row]).to_parquet
        write(str(tmp_path / f"{number}.parquet"))
        report = convert(str(tmp_path / f"{number}.parquet"), output, format="auto", ranked_as="ranks", skip_bad=False)
        assert (report.written, report.problems.texts) == (1, [])
        assert json.loads(output.read_text()) == expected
    for row, problem in (
        ({"images": [first] * 2, "conversations": asked}, "a row needs an image for each placeholder, got 2"),
        (
            {"images": ["other.png"], "conversations": asked},
            "paths of images must be relative to the folder of the out",
        ),
        ({"videos": ["a.mp4"], "conversations": asked}, "a row must be text, got column 'videos'"),
        ({"images": [first], "prompt": "q", "answers": [{"answer": "a", "rank": 1}]}, "a row must be text, got column"),
    ):
        source = write_jsonl([row], "faulty.jsonl")
        report = convert(str(source), output, format="auto", ranked_as="ranks", skip_bad=False)
        assert report.written == 0 and problem in report.problems.texts[0]


ALPACA = {"instruction": "q", "input": "", "output": "a"}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
OPENAI = {"messages": [user("q"), assistant("a")]}
LABELLED = {"prompt": [user("q")], "completion": [assistant("a")]}
PAIR = {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}


@pytest.mark.parametrize("row", [ALPACA, SHAREGPT, OPENAI])
def test_labels_and_rejected_answers_are_kept(row: Row, converted: Converted) -> None:
    """As conversations for SFT, undesirable answers would be learned."""
    for columns, expected in (
        ({"kto_tag": False}, {**LABELLED, "label": False}),
        ({"label": True}, {**LABELLED, "label": True}),
        ({"kto_tag": "False"}, {**LABELLED, "label": False}),
        ({"rejected_response": "b"}, PAIR),
        ({"rejected_messages": [user("q"), assistant("b")]}, PAIR),
        ({"label": None, "rejected_response": None}, OPENAI),
    ):
        assert converted([{**row, **columns}])[0] == [expected]
    (problem,) = converted([{**row, "kto_tag": "maybe"}])[1].problems.texts
    assert "column 'kto_tag' must be true or false, got 'maybe'" in problem


def test_helpsteer_and_nectar_become_ranked_answers_and_pairs(converted: Converted) -> None:
    rated = [
        {"prompt": "q", "response": text, "helpfulness": score, "correctness": 4}
        for text, score in (("a", 4), ("b", 1))
    ]
    several = "q\n<extra_id_1>Assistant\nr\n<extra_id_1>User\ns\n<extra_id_1>Assistant\n"
    ranked = {"prompt": [user("q")], "responses": [[assistant("a")], [assistant("b")]], "ranks": [1.0, 2.0]}
    assert converted(rated)[0] == [ranked]
    rated = [{**row, "prompt": several} for row in rated]
    assert converted(rated)[0] == [{**ranked, "prompt": [user("q"), assistant("r"), user("s")]}]
    answers = [{"answer": "b", "rank": 2.0, "model": "m"}, {"answer": "a", "rank": 1.0, "model": "n"}]
    nectar = {"prompt": "\n\nHuman: q\n\nAssistant: ", "answers": answers, "turns": 1}
    assert converted([nectar], ranked_as="pairs")[0] == [PAIR]
    equal = {"context": [user("q")], "response1": "a", "response2": "b", "overall_preference": 0}
    assert "a pair needs a preference" in converted([equal])[1].problems.texts[0]


@pytest.mark.parametrize("prompt", ["\n\nHuman: Sweet?", "Sweet?\n\nAssistant:", "Sweet?"])
def test_a_prompt_that_the_assistant_does_not_answer_is_no_dialogue(converted: Converted, prompt: str) -> None:
    with user_error("one of the formats hh, sharegpt.*got columns chosen, prompt, rejected"):
        converted([{"prompt": prompt, "chosen": "No.", "rejected": "Yes."}])


@pytest.mark.parametrize(
    ("format", "row", "problem"),
    [
        ("alpaca", {"instruction": "q"}, "column 'output' must be text, got none"),
        (
            "hh",
            {**DIALOGUE, "rejected": "\n\nHuman: x\n\nAssistant: c"},
            "columns 'chosen' and 'rejected' must begin with the same turn, the prompt, got 'a' and 'x'",
        ),
        ("hh", {**DIALOGUE, "rejected": DIALOGUE["chosen"]}, "columns 'chosen' and 'rejected' must differ, both are "),
        (
            "hh",
            {**DIALOGUE, "chosen": "\n\nHuman: a"},
            "column 'chosen' must have a turn after those that 'chosen' and 'rejected' share, got none",
        ),
        (
            "ultrafeedback",
            {"instruction": "q", "completions": []},
            "column 'completions' must have completions, got none",
        ),
        (
            "openai_comparisons",
            {"info": {"article": "x"}, "summaries": [], "choice": 0},
            "a comparison needs two summaries and a choice of 0 or 1, got 0",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "gpt", "value": "a"}]},
            "column 'conversations' must have a turn of the user, got gpt",
        ),
    ],
)
def test_the_problem_of_a_row_names_its_own_column(
    converted: Converted, format: FormatName, row: Row, problem: str
) -> None:
    """Messages named columns that the row cannot have ('prompt', 'chosen'), and a lone answer was accepted."""
    (text,) = converted([row], format=format)[1].problems.texts
    assert f".jsonl:1: {problem}" in text


def test_weights_and_other_keys_of_turns_are_kept(converted: Converted) -> None:
    """ShareGPT data with weights became rows that are trained on whole, also with `train: false`, and reasoning was
    lost."""
    thought = {"reasoning_content": "because"}
    turns: list[dict[str, Any]] = [
        {"from": "human", "value": "q", "weight": 0, "train": False},
        {"from": "gpt", "value": "a", "weight": 0, **thought},
        {"from": "human", "value": "r", "weight": None},
        {"from": "gpt", "value": "b", "train": False},
        {"from": "gpt", "value": "c", "weight": 1, "loss": True},
    ]
    first = {**assistant("a"), "weight": 0, **thought}
    messages = [user("q"), first, user("r"), {**assistant("b"), "weight": 0}, assistant("c")]
    marked = [{**turn, "train": False} if turn == assistant("b") else turn for turn in messages]
    for row in ({"conversations": turns}, {"messages": messages}, {"messages": marked}):
        assert converted([row])[0] == [{"messages": messages}]
    for key, value, problem in (
        ("weight", 0.5, "the weight of a turn must be 0 or 1, got 0.5"),
        ("train", "no", "'train' must be true or false, got 'no'"),
    ):
        _, report = converted([{"conversations": [*turns[:4], turns[4] | {key: value}]}])
        assert problem in report.problems.texts[0]


def tree_message(name: str, parent: str | None, text: str, rank: int | None = None, **more: Any) -> Row:
    """A row of oasst1."""
    role = "assistant" if name.startswith("a") else "prompter"
    return {"message_id": name, "parent_id": parent, "text": text, "role": role, "rank": rank, "lang": "en", **more}


TREE = [
    tree_message("a2", "p1", "worse", 1),  # before its parent, as rows may be in any order
    tree_message("p1", None, "question"),
    tree_message("a1", "p1", "better", 0),
    tree_message("a3", "p1", "spam", 2, deleted=True),
    tree_message("p2", "a1", "and then?"),
    tree_message("a4", "p2", "this"),
    tree_message("p3", "a2", "why?"),
    tree_message("a5", "p3", "so"),
]


def test_trees_become_ranked_answers_or_the_best_conversations(converted: Converted, write_jsonl: Write) -> None:
    file = write_jsonl(TREE)
    rows, report = converted(file)
    assert (report.format, report.rows) == ("openassistant", len(TREE))
    assert rows == [
        {"prompt": [user("question")], "responses": [[assistant("better")], [assistant("worse")]], "ranks": [0.0, 1.0]}
    ]
    best = [user("question"), assistant("better"), user("and then?"), assistant("this")]
    assert converted(file, ranked_as="messages")[0] == [{"messages": best}]


def test_a_tree_in_one_row_is_the_same(converted: Converted) -> None:
    flat, _ = converted(TREE)
    by_parent: dict[str | None, list[Row]] = {}
    for message in TREE:
        by_parent.setdefault(message["parent_id"], []).append(message)

    def nested(message: Row) -> Row:
        own = {key: value for key, value in message.items() if key != "parent_id"}
        return own | {"replies": [nested(reply) for reply in by_parent.get(message["message_id"], [])]}

    root = nested(by_parent[None][0])
    tree = {"message_tree_id": "p1", "tree_state": "ready_for_export", "prompt": root}
    rows, report = converted([tree])
    assert rows == flat and report.format == "openassistant"


def test_a_row_with_a_bad_message_is_skipped_whole(converted: Converted, write_jsonl: Write) -> None:
    """The ranked answers that precede the bad message in its tree were written."""
    answers = [tree_message(f"a9{rank}", "p9", f"answer {rank}", rank) for rank in range(2)]
    answers[1] |= {"replies": [tree_message("p9", "a91", "taken")]}
    tree = {"prompt": tree_message("p9", None, "another question") | {"replies": answers}}
    file = write_jsonl([tree, *TREE])
    assert converted(file)[1].problems.texts[0].startswith(f"{file}:1: a message has a 'message_id' of its own")
    assert converted(file, skip_bad=True)[0] == converted(TREE)[0]


def test_a_message_outside_of_a_tree_is_a_problem(converted: Converted, write_jsonl: Write) -> None:
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
        ("pairs", {**PAIR, "chosen": [assistant("b")], "rejected": [assistant("c")]}),
        ("messages", {"messages": [user("q"), assistant("b")]}),
    ],
)
def test_scores_become_ranks_a_pair_or_a_conversation(
    ranked_as: RankedAs, row: Row, converted: Converted, write_jsonl: Write
) -> None:
    completions = [feedback("a", 6.5), feedback("b", 8.0), feedback("c", rating="2")]
    file = write_jsonl([{"source": "x", "instruction": "q", "completions": completions}])
    rows, report = converted(file, ranked_as=ranked_as)
    assert rows == [row] and report.format == "ultrafeedback"


def test_equal_scores_and_missing_ones_are_problems(converted: Converted, write_jsonl: Write) -> None:
    equal = {"instruction": "q", "completions": [feedback("a", 7), feedback("b", 7)]}
    missing = {"instruction": "q", "completions": [feedback("a", 7), feedback("b", rating="N/A")]}
    file = write_jsonl([equal, missing])
    for ranked_as in ("ranks", "pairs"):
        rows, report = converted(file, ranked_as=ranked_as)  # type: ignore[arg-type]
        assert rows == [] and report.problems.count == 2
        assert f"{file}:1: " in report.problems.texts[0] and "two different ranks" in report.problems.texts[0]
        assert report.problems.texts[1].startswith(f"{file}:2: completion 2 must have a score")


BAD = [
    ({"conversations": [{"from": "alien", "value": "x"}]}, "'from' must be one of human"),
    ({"conversations": [{"from": "human", "value": "x"}]}, "must have an assistant turn"),
    ({"conversations": [{"from": "function_call", "value": "not json"}]}, "must be JSON"),
    ({"conversations": "text"}, "column 'conversations' must be a list of turns, got str"),
    ({"conversations": [{"from": "gpt", "value": "<tool_call>{}"}]}, "must end with </tool_call>"),
]


def test_each_bad_row_is_a_problem_with_its_line(converted: Converted, write_jsonl: Write) -> None:
    file = write_jsonl([SHAREGPT, *(row for row, _ in BAD)])
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


EXAMPLES: dict[FormatName, Row] = {
    "hh": DIALOGUE,
    "sharegpt": SHAREGPT | {"system": "s", "tools": "[]", "chosen": {}},
    "alpaca": ALPACA | {"history": [["a", "b"]], "system": "s"},
    "ultrafeedback": {"instruction": "q", "completions": [feedback("a", 1), feedback("b", rating="2")]},
    "openassistant": TREE[1],
    "helpsteer2": {"prompt": "q", "response": "a", "helpfulness": 3},
    "helpsteer3": {"context": [user("q")], "response1": "a", "response2": "b", "overall_preference": -1},
    "nectar": {"prompt": "\n\nHuman: q\n\nAssistant: ", "answers": [{"answer": "a", "rank": 1.0}]},
    "openai_comparisons": {"info": {"article": "x"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 0},
    "openai_messages": OPENAI | {"tools": [], "input": {}, "preferred_output": []},
    "query": {"query": "q", "response": "a", "history": [["a", "b"]], "system_prompt": "s", "label": True},
}
KEYS = "role content from value tool_calls function_call tool_call type response annotations text replies".split()
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
