"""Tool calls in the text of a completion."""

from __future__ import annotations

import json

import pytest

from hybrid_rlhf.data.chat.calls import AssistantTurn, ToolCall, function_names, read_reply, shown_so_far
from hybrid_rlhf.data.chat.messages import read_message

NAMES = frozenset({"add", "get.time"})
ADD, TIME = ToolCall("add", {"x": 1, "y": [2]}), ToolCall("get.time", {})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": [2]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I add.\n{HERMES}", "I add.", [ADD]),
        (f'{HERMES}\n<tool_call>{{"name": "get.time"}}</tool_call>', "", [ADD, TIME]),
        ('{"name": "add", "parameters": {"x": 1, "y": [2]}}', "", [ADD]),
        ('<|python_tag|>{"name": "get.time", "parameters": {}}; {"name": "add", "arguments": {"x": 1, "y": [2]}}', "",
         [TIME, ADD]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"x": 1, "y": [2]}}, {"name": "get.time", "arguments": {}}]', "",
         [ADD, TIME]),
        (' [{"name": "add", "arguments": "{\\"x\\": 1, \\"y\\": [2]}"}]', "", [ADD]),
        ('[TOOL_CALLS]add[ARGS]{"x": 1, "y": [2]}[TOOL_CALLS]get.time{}', "", [ADD, TIME]),
        ("[TOOL_CALLS]get.time[ARGS]null", "", [TIME]),
    ],
)  # fmt: skip
def test_every_format_is_read(text: str, content: str, calls: list[ToolCall]) -> None:
    assert read_reply(text, NAMES) == AssistantTurn(content, calls)
    assert read_reply(text, frozenset()) == AssistantTurn(text)


@pytest.mark.parametrize("arguments", ["null", '"null"', '""', '"{}"', "{}"])
def test_null_arguments_are_none(arguments: str) -> None:
    """In what a model writes, and in rows and histories."""
    call = f'{{"name": "get.time", "arguments": {arguments}}}'
    for text in (f"<tool_call>{call}</tool_call>", call, call.replace("arguments", "parameters")):
        assert read_reply(text, NAMES).calls == [TIME]
    message = {"role": "assistant", "tool_calls": [{"function": json.loads(call)}]}
    assert read_message("m", message)["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        "",
        "{",
        "[1, 2]",
        '{"name": "other", "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": {}} and more',
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": "add"}',
        '{"name": ["add"]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read_reply(text, NAMES) == AssistantTurn(text)


@pytest.mark.parametrize("text", [f"I add. \n{HERMES}", "a <b> tool_call", '{"name": "add"}', "  hi ", HERMES, "adx"])
def test_what_is_shown_early_is_shown_in_the_end(text: str) -> None:
    content, shown = read_reply(text, NAMES).content, 0
    for end in range(len(text) + 1):
        shown = max(shown, shown_so_far(text[:end], NAMES))
        assert content.startswith(text[:shown])
    if "<tool" in text[1:]:
        assert shown == len(content) > 0


def test_a_later_message_repeats_a_turn() -> None:
    reply = read_reply(f"I add.\n{HERMES}", NAMES)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"y": [2], "x": 1}'}}
    same = {"role": "assistant", "content": "I add.", "tool_calls": [call]}
    assert reply.is_repeated_by(read_message("m", same))
    for other in ({**same, "content": "I"}, {"role": "user", "content": "I add."}, {**same, "tool_calls": None}):
        assert not reply.is_repeated_by(read_message("m", other))


def test_names_of_functions() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}, {"name": "flat"}, {"function": 3}, {}]
    assert function_names(tools) == {"add", "flat"} and function_names(None) == frozenset()
