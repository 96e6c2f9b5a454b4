"""The formats that LLaMA-Factory, ms-swift and axolotl document are read as they mean them, or refused with the column,
by conversion and by training alike."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.configs.commands.data import FormatName
from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.data.chat.conversation import encode_segments
from hybrid_rlhf.data.chat.messages import is_learned, read_message
from hybrid_rlhf.data.encoding import encode_sft_row
from hybrid_rlhf.data.preparation.checking import check_source
from hybrid_rlhf.data.preparation.conversion.converting import CONVERSIONS
from hybrid_rlhf.data.preparation.splitting import prompt_key
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import (
    read_labelled_row,
    read_preference_row,
    read_prompt_row,
    read_sft_row,
    read_stepwise_row,
)
from hybrid_rlhf.data.rows.problems import RowProblems
from tests.data.rows import Converted, learned
from tests.support.errors import refused, user_error
from tests.support.messages import assistant, user
from tests.support.tiny import tiny_tokenizer

Write = Callable[..., Path]
SYSTEM = {"role": "system", "content": "s"}
CHAT = [user("q"), assistant("a")]
LONG = [SYSTEM, user("p"), assistant("o"), user("q"), assistant("a")]
PAIR = {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
SYSTEM_PAIR = {**PAIR, "prompt": [SYSTEM, user("q")]}
LABELLED = {"prompt": [SYSTEM, user("q")], "completion": [assistant("a")], "label": False}
SCHEMA = {"name": "aqi", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": SCHEMA}]
CITIES = ("Oslo", "Rome")
CALLS = [json.dumps({"name": "aqi", "arguments": {"city": city}}) for city in CITIES]
RESULTS = [{"role": "tool", "name": "aqi", "content": f'{{"city": "{city}"}}'} for city in CITIES]


def called(*cities: str, **more: Any) -> Row:
    """A turn that calls the tool."""
    functions = [{"name": "aqi", "arguments": {"city": city}} for city in cities]
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": each} for each in functions], **more}


AGENT = [user("q"), called(*CITIES), *RESULTS, assistant("a")]
SWIFT_CALLS = [{"role": "tool_call", "content": call} for call in CALLS]
SWIFT_AGENT = [
    user("q"),
    *SWIFT_CALLS,
    *({"role": "tool_response", "content": result["content"]} for result in RESULTS),
    assistant("a"),
]
SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
ANSWERS = {"chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}}
RANKED = {"chosen": "a", "rejected": "b"}
BLOCKS = [
    user("q"),
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "t1", "name": "aqi", "input": {"city": "Oslo"}},
        ],
    },
    user([{"type": "tool_result", "tool_use_id": "t1", "content": "10"}, {"type": "text", "text": "r"}]),
    assistant("a"),
]
ANTHROPIC = [
    user("q"),
    {**called("Oslo", content="Let me look.")},
    {"role": "tool", "name": "aqi", "tool_call_id": "t1", "content": "10"},
    user("r"),
    assistant("a"),
]
ANTHROPIC[1]["tool_calls"][0] |= {"id": "t1"}

CONVERTED: list[tuple[str, FormatName, Row, Row]] = [
    # LLaMA-Factory, data/README.md
    (
        "alpaca with system and history",
        "alpaca",
        {"instruction": "q", "input": "", "output": "a", "system": "s", "history": [["p", "o"]]},
        {"messages": LONG},
    ),
    ("alpaca with an input alone", "alpaca", {"instruction": "", "input": "q", "output": "a"}, {"messages": CHAT}),
    ("alpaca with two answers", "alpaca", {"instruction": "q", "input": "", **RANKED}, PAIR),
    (
        "preferences of OpenAI",
        "openai_messages",
        {
            "input": {"messages": CHAT[:1], "tools": [], "parallel_tool_calls": True},
            "preferred_output": PAIR["chosen"],
            "non_preferred_output": PAIR["rejected"],
        },
        PAIR,
    ),
    *(
        (
            f"calls as {style}",
            "openai_messages",
            {"messages": [user("q"), {"role": "assistant", **turn}, {**result, "content": "10"}, CHAT[1]]},
            {"messages": [user("q"), called("Oslo"), {"role": "tool", "name": "aqi", "content": "10"}, CHAT[1]]},
        )
        for style, turn, result in (
            ("function_call", {"function_call": json.loads(CALLS[0])}, {"role": "function"}),
            ("text in JSON", {"content": f"<tool_call>\n{CALLS[0]}\n</tool_call>"}, {"role": "tool"}),
            ("text in Python", {"content": f"<tool_call>{json.loads(CALLS[0])}</tool_call>"}, {"role": "tool"}),
        )
    ),
    (
        "several calls and results in one text",
        "openai_messages",
        {
            "messages": [
                user("q"),
                assistant("Look.\n" + "".join(f"<tool_call>{call}</tool_call>" for call in CALLS)),
                {"role": "tool", "content": "<tool_response>1</tool_response><tool_response>2</tool_response>"},
                CHAT[1],
            ]
        },
        {
            "messages": [
                user("q"),
                called(*CITIES, content="Look."),
                *({"role": "tool", "name": "aqi", "content": text} for text in "12"),
                CHAT[1],
            ]
        },
    ),
    (
        "alpaca for KTO",
        "alpaca",
        {"instruction": "q", "output": "a", "system": "s", "kto_tag": False},
        LABELLED,
    ),
    (
        "sharegpt with tools",
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": f"[{', '.join(CALLS)}]"},
                *({"from": "observation", "value": result["content"]} for result in RESULTS),
                {"from": "gpt", "value": "a"},
            ],
            "tools": json.dumps([SCHEMA]),
        },
        {"messages": AGENT, "tools": TOOLS},
    ),
    (
        "sharegpt whose turn of the system repeats the column",
        "sharegpt",
        {"system": "s", "conversations": [{"from": "system", "value": "s"}, *SHARED]},
        {"messages": [SYSTEM, *CHAT]},
    ),
    (
        "sharegpt with two answers and a margin",
        "sharegpt",
        {"conversations": SHARED[:1], **ANSWERS, "margin": 0.5},
        {**PAIR, "margin": 0.5},
    ),
    (
        "messages with two answers",
        "openai_messages",
        {"messages": [SYSTEM, user("q")], "chosen": assistant("a"), "rejected": assistant("b")},
        SYSTEM_PAIR,
    ),
    ("messages of sharegpt", "sharegpt", {"messages": SHARED}, {"messages": CHAT}),
    (
        "tools that the system prompt lists",
        "sharegpt",
        {"conversations": SHARED, "system": "<tools>[...]</tools>", "tools": json.dumps([SCHEMA])},
        {"messages": [{"role": "system", "content": "<tools>[...]</tools>"}, *CHAT]},
    ),
    # ms-swift, docs/source_en/Customization/Custom-dataset.md and Instruction/Agent-support.md
    (
        "query and response",
        "query",
        {"system": "s", "query": "q", "response": "a", "history": [["p", "o"]]},
        {"messages": LONG},
    ),
    ("query beside other names", "query", {"query": "q", "response": "a", "answer": "7"}, {"messages": CHAT}),
    (
        "query with a rejected answer",
        "query",
        {"query": "q", "response": "a", "rejected_response": "b", "margin": 2},
        {**PAIR, "margin": 2},
    ),
    (
        "questions with their answers",
        "sharegpt",
        {"system": "s", "conversation": [{"assistant": "o", "human": "p"}, {"human": "q", "assistant": "a"}]},
        {"messages": LONG},
    ),
    (
        "messages beside a system prompt",
        "openai_messages",
        {"messages": CHAT, "system": "s"},
        {"messages": LONG[:1] + CHAT},
    ),
    (
        "turns of calls and results",
        "openai_messages",
        {"messages": SWIFT_AGENT, "tools": json.dumps(TOOLS), "channel": "agent"},
        {"messages": AGENT, "tools": TOOLS, "channel": "agent"},
    ),
    (
        "reasoning before a turn of calls",
        "openai_messages",
        {"messages": [user("q"), assistant("<think>x</think>\n"), SWIFT_CALLS[0], RESULTS[0], assistant("a")]},
        {"messages": [user("q"), called("Oslo", content="<think>x</think>\n"), RESULTS[0], assistant("a")]},
    ),
    (
        "the mark of loss of the first of several calls",
        "openai_messages",
        {"messages": [user("q"), {**SWIFT_CALLS[0], "loss": False}, *SWIFT_AGENT[2:]]},
        {"messages": [user("q"), called(*CITIES, weight=0), *AGENT[2:]]},
    ),
    (
        "what is rejected follows the last question",
        "openai_messages",
        {"messages": SWIFT_AGENT, "rejected_response": [assistant("b")], "tools": TOOLS},
        {"prompt": [user("q")], "chosen": AGENT[1:], "rejected": [assistant("b")], "tools": TOOLS},
    ),
    (
        "calls in what is rejected",
        "openai_messages",
        {"messages": SWIFT_AGENT, "rejected_messages": [user("q"), SWIFT_CALLS[1], RESULTS[1], assistant("b")]},
        {
            "prompt": [user("q")],
            "chosen": AGENT[1:],
            "rejected": [called("Rome"), RESULTS[1], assistant("b")],
        },
    ),
    ("parts of Anthropic", "openai_messages", {"messages": BLOCKS}, {"messages": ANTHROPIC}),
    (
        "functions",
        "openai_messages",
        {"prompt": "q", "completion": "a", "functions": [SCHEMA]},
        {"prompt": "q", "completion": "a", "tools": TOOLS},
    ),
    # axolotl, docs/dataset-formats/ and docs/rlhf.qmd
    ("conversations of roles", "sharegpt", {"conversations": CHAT}, {"messages": CHAT}),
    (
        "pygmalion",
        "sharegpt",
        {"conversations": [{"role": "human", "value": "q"}, {"role": "bot", "value": "a"}]},
        {"messages": CHAT},
    ),
    (
        "parameters as text",
        "openai_messages",
        {
            "messages": CHAT,
            "tools": [{"type": "function", "function": {**SCHEMA, "parameters": json.dumps(SCHEMA["parameters"])}}],
        },
        {"messages": CHAT, "tools": TOOLS},
    ),
    (
        "alpaca_chat, gpteacher",
        "query",
        {"instruction": "p", "input": "q", "response": "a"},
        {"messages": [user("p\nq"), CHAT[1]]},
    ),
    *(
        (f"{asked} and {said}", "query", {asked: "q", said: "a"}, {"messages": CHAT})
        for asked, said in (("problem", "solution"), ("INSTRUCTION", "RESPONSE"), ("prompt", "generation"))
    ),
    (
        "load_open_orca",
        "query",
        {"system_prompt": "s", "question": "q", "response": "a"},
        {"messages": [SYSTEM, *CHAT]},
    ),
    (
        "chatml.argilla",
        "query",
        {"system": "s", "instruction": "q", "chosen_response": "a", "rejected_response": "b"},
        SYSTEM_PAIR,
    ),
    *(
        (f"{asked} with two answers", "query", {"system": "s", asked: "q", **RANKED}, SYSTEM_PAIR)
        for asked in ("input", "question")
    ),
    ("chatml.prompt_pairs", "openai_messages", {"system": "s", "prompt": "q", **RANKED}, {**SYSTEM_PAIR, **RANKED}),
    (
        "chatml.ultra",
        "openai_messages",
        {"system": "s", "prompt": "q", "chosen": CHAT, "rejected": [CHAT[0], assistant("b")]},
        {"prompt": [SYSTEM, user("q")], "chosen": CHAT, "rejected": [CHAT[0], assistant("b")]},
    ),
    (
        "kto, chatml.intel",
        "query",
        {"system": "s", "question": "q", "completion": "a", "label": False},
        LABELLED,
    ),
    (
        "kto, llama3.argilla_chat",
        "openai_messages",
        {"completion": [SYSTEM, *CHAT], "label": False},
        LABELLED,
    ),
    (
        "kto, chatml.ultra",
        "openai_messages",
        {"system": "s", "prompt": "q", "completion": "a", "label": False},
        {**LABELLED, "completion": "a"},
    ),
    # HelpSteer2 and 3, and the comparisons of OpenAI
    *(
        ("helpsteer3", "helpsteer3", {"context": [user("q")], **answers}, PAIR)
        for answers in (
            {"response1": "a", "response2": "b", "overall_preference": -2},
            {"response1": "b", "response2": "a", "overall_preference": 1},
        )
    ),
    (
        "helpsteer2",
        "helpsteer2",
        {"prompt": "q", "response_1": "a", "response_2": "b", "preference_strength": -1},
        PAIR,
    ),
    (
        "answers of WebGPT",
        "openai_comparisons",
        {"question": {"full_text": "q"}, "answer_0": "a", "answer_1": "b", "score_0": 0.5, "score_1": -0.5},
        PAIR,
    ),
    (
        "summaries",
        "openai_comparisons",
        {
            "info": {"id": "t3", "post": "p", "title": "t", "subreddit": "s"},
            "summaries": [{"text": " b"}, {"text": " a", "policy": "ref"}],
            "choice": 1,
        },
        {**PAIR, "prompt": [user("SUBREDDIT: r/s\n\nTITLE: t\n\nPOST: p\n\nTL;DR:")]},
    ),
]


@pytest.mark.parametrize(("name", "format", "row", "expected"), CONVERTED, ids=[name for name, *_ in CONVERTED])
def test_a_documented_format_is_converted(
    name: str, format: FormatName, row: Row, expected: Row, converted: Converted
) -> None:
    (found,), report = converted([row])
    assert (report.format, found) == (format, expected)
    assert set(report.unread) == ({"answer"} if name == "query beside other names" else set())


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"query": "q", "answer": "a", "solution": "b"}, "one question and one answer, got columns answer, solution"),
        ({"query": "q", "response": "a", "videos": ["x.mp4"]}, "a row must be text, got column 'videos'"),
        ({"messages": CHAT, "rejected_tools": TOOLS}, "all rows are rendered alike, got column 'rejected_tools'"),
        ({"conversations": [{"from": "system", "value": "t"}, *SHARED], "system": "s"}, "has one system prompt"),
        ({"query": "q", "response": "a", "system": "s", "system_prompt": "t"}, "columns system and system_prompt"),
        ({"messages": [user("q"), {**CHAT[1], "loss": False}, SWIFT_CALLS[0]]}, "another mark of loss on its calls"),
        ({"messages": [user("q"), {**CHAT[1], "loss_scale": 2.0}]}, "'loss_scale' must be true or false, got 2.0"),
        ({"messages": CHAT, "label": True, "rejected_messages": CHAT}, "a label or a rejected answer"),
        ({"messages": CHAT, "rejected_response": "b", "rejected_messages": CHAT}, "a label or a rejected answer"),
        ({"messages": CHAT, "tools": TOOLS, "functions": TOOLS}, "a column 'tools' or 'functions', got both"),
        (
            {"messages": [user("q"), {**called("Oslo"), "function_call": {"name": "f"}}]},
            "'tool_calls' or 'function_call'",
        ),
        ({"messages": [user("q"), assistant(f"<tool_call>{CALLS[0]}</tool_call> Wait.")]}, "no text follows it"),
        (
            {"messages": [*AGENT[:2], {"role": "tool", "content": "x<tool_response>1</tool_response>"}, CHAT[1]]},
            "must have no other text",
        ),
        ({"messages": [user("q"), {"role": "assistant", "content": BLOCKS[1]["content"][::-1]}]}, "text precedes the"),
        ({"conversations": [{"from": "human", "value": "q", "content": "r"}, SHARED[1]]}, "must have 'from' and"),
    ],
)
def test_what_a_conversion_would_lose_is_a_problem(
    row: Row, problem: str, converted: Converted, write_jsonl: Write
) -> None:
    """Each of these was written without one of its texts, or with the texts in another order."""
    file = write_jsonl([row])
    _, report = converted(file)
    (text,) = report.problems.texts
    assert text.startswith(f"{file}:1: ") and problem in text and "\n" not in text


CALL = '{"name": "aqi", "arguments": {"city": "#"}}'
KINDS: dict[str, Row] = {
    "user": user("#"),
    "user in parts": user([{"type": "text", "text": "#"}, {"type": "text", "text": "#"}]),
    "answer": assistant("#"),
    "unlearned answer": {**assistant("#"), "loss": False},
    "answer with reasoning": {**assistant("#"), "reasoning_content": "#"},
    "ms-swift's call": {"role": "tool_call", "content": CALL},
    "ms-swift's unlearned call": {"role": "tool_call", "content": CALL, "loss": False},
    "ms-swift's result": {"role": "tool_response", "content": "#"},
    "OpenAI's calls": {"role": "assistant", "content": "#", "tool_calls": [json.loads(CALL), json.loads(CALL)]},
    "OpenAI's function": {"role": "assistant", "function_call": json.loads(CALL)},
    "result": {"role": "tool", "content": "#"},
    "Hermes's call": assistant(f"#\n<tool_call>\n{CALL}\n</tool_call>"),
    "Hermes's results": {"role": "tool", "content": "<tool_response>#</tool_response><tool_response>#</tool_response>"},
    "Anthropic's call": {
        "role": "assistant",
        "content": [{"type": "text", "text": "#"}, {"type": "tool_use", "name": "aqi", "input": {"city": "#"}}],
    },
    "Anthropic's results": user([{"type": "tool_result", "content": "#"}, {"type": "text", "text": "#"}]),
}
"""Turns of messages; each # is a text of its own."""


@settings(max_examples=200)
@given(st.lists(st.sampled_from(list(KINDS)), max_size=6), st.booleans())
def test_every_text_of_a_conversation_is_converted_once_in_order_or_is_a_problem(
    kinds: list[str], shared: bool
) -> None:
    number = itertools.count(10)
    written = re.sub("#", lambda _: f"t{next(number)}", json.dumps([user("#"), *map(KINDS.get, kinds), assistant("#")]))
    turns = json.loads(written)
    row: Row = {"messages": turns, "tools": [SCHEMA]}
    if shared:
        row = {"conversations": [{"from": turn["role"], **turn} for turn in turns], "tools": [SCHEMA]}
    problems = RowProblems()
    format: FormatName = "sharegpt" if shared else "openai_messages"
    for _, found in CONVERSIONS[format]([("f:1", row)], "ranks", problems):
        assert isinstance(found, dict)
        parts = [
            json.dumps([turn.get("reasoning_content"), turn.get("content"), turn.get("tool_calls")])
            for turn in found["messages"]
        ]
        expected = [text for turn in turns for text in _texts(turn)]
        assert re.findall(r"t\d\d", "".join(parts)) == expected
        with_loss = [part for turn, part in zip(found["messages"], parts, strict=True) if is_learned(turn)]
        unlearned = {text for turn in turns if turn.get("loss") is False for text in _texts(turn)}
        assert not unlearned & set(re.findall(r"t\d\d", "".join(with_loss)))
    assert all(text.startswith("f:1: ") for text in problems.texts)


def _texts(turn: Row) -> list[str]:
    """The texts of a turn, reasoning before content before calls."""
    keys = ("reasoning_content", "content", "tool_calls", "function_call")
    return re.findall(r"t\d\d", json.dumps([turn.get(key) for key in keys]))


def test_columns_that_a_format_does_not_have_are_counted(converted: Converted) -> None:
    rows: list[Row] = [
        {"instruction": "q", "input": "", "output": "a", "reflection": "x", "label": "good", "id": ""},
        {"instruction": "q", "input": "", "output": "a", "reflection": "y"},
        {"instruction": "q", "reflection": "not converted"},
    ]
    _, report = converted(rows, skip_bad=True)
    assert report.unread == {"reflection": 2, "label": 1}


def test_other_names_of_columns_and_turns_are_given(converted: Converted, write_jsonl: Write) -> None:
    """The columns and tags of LLaMA-Factory's dataset_info.json, axolotl's message_property_mappings and roles."""
    turns = [{"speaker": "Client", "text": "q"}, {"speaker": "Agent", "text": "a"}]
    tags = {"from": "speaker", "value": "text", "human": "Client", "gpt": "Agent"}
    file = write_jsonl([{"dialog": turns, "preprompt": "s"}])
    source = DataSource(path=str(file), columns={"conversations": "dialog", "system": "preprompt"})
    assert converted(file, source=source, tags=tags)[0] == [{"messages": [SYSTEM, *CHAT]}]
    answers = {"better": turns[1], "worse": {**turns[1], "text": "b"}}
    file = write_jsonl([{"dialog": turns[:1], **answers}], "pairs.jsonl")
    columns = {"conversations": "dialog", "chosen": "better", "rejected": "worse"}
    assert converted(file, source=DataSource(path=str(file), columns=columns), tags=tags)[0] == [PAIR]


def test_steps_refuse_rows_of_which_they_would_read_a_part() -> None:
    """A system prompt, a history and settings beside the columns of a step were left out without a word."""
    pair = {"prompt": "q", **RANKED}
    for read, row in (
        (read_sft_row, {"messages": CHAT}),
        (read_preference_row, pair),
        (read_labelled_row, {"prompt": "q", "completion": "a", "label": True}),
        (read_stepwise_row, {"prompt": "q", "completions": ["a"], "labels": [1]}),
        (read_prompt_row, {"prompt": "q"}),
    ):
        read("f:1", {**row, "system": "", "history": [], "channel": "math"})
        for column, value in (("system", "s"), ("system_prompt", "s"), ("functions", "s")):
            assert refused(read, "f:1", {**row, column: value}).startswith(
                f"f:1: a row has its turns and tools in the columns of its step, got column '{column}' with s"
            )
        assert "set data.chat_template_kwargs for all rows" in refused(
            read, "f:1", {**row, "chat_template_kwargs": {"enable_thinking": False}}
        )
        if read is not read_prompt_row:
            assert "column 'history'" in refused(read, "f:1", {**row, "history": [["p", "o"]]})
    for messages in (SWIFT_AGENT, BLOCKS):
        assert refused(read_sft_row, "f:1", {"messages": messages}).endswith(
            "convert the row with hybrid-rlhf data convert"
        )
    assert read_prompt_row("f:1", {"prompt": "q", "history": [1]}).columns == {"history": [1]}, "for environments"
    with user_error("got the format openai_messages: convert it"):
        read_preference_row("f:1", {"messages": [user("q")], "chosen": [CHAT[1]], "rejected": [assistant("b")]})
    with user_error("got the format openai_messages: convert it"):
        read_sft_row("f:1", {"messages": [*CHAT, user("r")], "chosen": CHAT[1], "rejected": assistant("b")})
    with user_error("got the format openai_messages: convert it"):
        read_labelled_row("f:1", {"completion": CHAT, "label": True})
    assert "or for SFT convert it" in refused(read_sft_row, "f:1", {"query": "q", "response": "a"})


def test_parts_of_a_turn_are_text_with_the_loss_of_the_turn() -> None:
    """Parts that axolotl does not learn were learned, parts of another type became text, and reasoning in parts was
    rendered as a list of Python."""
    marked = [{"type": "text", "text": "Hm."}, {"type": "text", "text": " 4", "train": True}]
    turn = {"role": "assistant", "content": marked, "reasoning_content": marked[:1]}
    assert read_message("f:1", turn) == {"role": "assistant", "content": "Hm. 4", "reasoning_content": "Hm."}
    for key in ("content", "reasoning_content"):
        for flag in ({"train": False}, {"weight": 0}):
            with user_error(f"f:1: a turn carries loss as a whole, got parts without loss in {key}"):
                read_message("f:1", {**turn, key: [marked[1], {**marked[0], **flag}]})
    with user_error("got parts without loss in 'train_detail'"):
        detail = [{"begin_offset": 0, "end_offset": 2, "train": False}]
        read_message("f:1", {**assistant("a"), "train_detail": detail})
    with user_error("the content of a message must be text"):
        read_message("f:1", user([{"type": "image", "text": "a cat"}]))


def test_segments_are_tokenised_apart_and_carry_their_own_loss(write_jsonl: Write) -> None:
    """Without a chat template, BOS or EOS: axolotl's input_output."""
    tokenizer = tiny_tokenizer()
    segments = [("Hello ", False), ("there", True), (" you", False), ("!<|im_end|>", True)]
    row = {"segments": [{"text": text, "label": label} for text, label in segments]}
    (encoded,) = encode_sft_row("f:1", row, tokenizer, 100)
    assert tokenizer.decode(encoded["input_ids"]) == "Hello there you!<|im_end|>"
    apart = encode_segments(segments, tokenizer)
    assert (encoded["input_ids"], encoded["loss_mask"]) == (apart.input_ids, apart.loss_mask)
    assert learned(apart, tokenizer) == "there!<|im_end|>"
    report = check_source(str(write_jsonl([row])), tokenizer=tokenizer)
    assert (report.task, dict(report.forms), report.problems.count) == ("sft", {"segments": 1}, 0)
    assert prompt_key("f:1", row) == "Hello there you!<|im_end|>"
    for wrong, problem in (
        ([{"text": "a"}], "must be a list of"),
        ("a", "must be a list of"),
        ([{"text": "a", "label": False}], "must have a text with label true"),
    ):
        assert problem in refused(read_sft_row, "f:1", {"segments": wrong})
