"""Reads the tool calls that a model has written from the text of its completion.

Formats, with special tokens or without, as decoding may skip them: `<tool_call>{"name", "arguments"}</tool_call>`
(Hermes, Qwen); JSON with `name` and `parameters` or `arguments`, one call, a list, or several with `;` in between
(Llama 3 after `<|python_tag|>`, Mistral after `[TOOL_CALLS]`); `name{...}` (Mistral since v11);
`<|channel|>commentary to=functions.name json<|message|>{...}`, also with the name first (gpt-oss). Arguments that are
null or missing are none. Only calls of functions that the conversation offers are read: text that does not parse, or
names another function, stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rlhf.data.chat.messages import Message, Tools, read_arguments

_TAG = "<tool_call>"
_TAGGED = re.compile(rf"{_TAG}(.*?)</tool_call>", re.DOTALL)
_BETWEEN = re.compile(r"(?:\[TOOL_CALLS\]|<\|python_tag\|>|[;,\s])*")
_NAME = re.compile(r"([\w.-]+)\s*(?:(?:\[ARGS\])?\s*(?=\{)|\[ARGS\]\s*(?=null\b))")
_COMMENTARY = "<|channel|>commentary"
_RECIPIENT = re.compile(
    rf"(?:{re.escape(_COMMENTARY)})?\s*to=(?:functions\.)?([\w.-]+)\s*(?:{re.escape(_COMMENTARY)})?[\s\w]*<\|message\|>"
)
_OPENINGS = ("{", "[", "<|python_tag|>", _COMMENTARY, "to=")
"""Beginnings of a completion that consists of calls only."""
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """One call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class AssistantTurn:
    """A turn of the assistant."""

    content: str
    """Text outside of the calls."""
    calls: Sequence[ToolCall] = ()

    def is_repeated_by(self, message: Message) -> bool:
        """Return True if a message of a later request is this turn."""
        content = message.get("content") or ""
        functions = [call["function"] for call in message.get("tool_calls", [])]
        calls = [ToolCall(function["name"], function["arguments"]) for function in functions]
        return message["role"] == "assistant" and content.strip() == self.content.strip() and calls == list(self.calls)


def function_names(tools: Tools | None) -> frozenset[str]:
    """Names of the functions that a conversation offers."""
    schemas = [tool.get("function", tool) for tool in tools or []]
    functions = [function for function in schemas if isinstance(function, dict)]
    return frozenset(str(function["name"]) for function in functions if isinstance(function.get("name"), str))


def read_reply(text: str, names: Collection[str]) -> AssistantTurn:
    """Text and calls of a completion.

    Args:
        text: text of the completion.
        names: functions that may be called; if empty, everything is text.
    """
    if not names:
        return AssistantTurn(text)
    try:
        tagged = _TAGGED.findall(text)
        if tagged:
            calls = [call for block in tagged for call in _calls(block, names)]
            return AssistantTurn(_TAGGED.sub("", text).rstrip(), calls)
        calls = list(_calls(text, names))
        return AssistantTurn("", calls) if calls else AssistantTurn(text)
    except (ValueError, RecursionError):
        return AssistantTurn(text)


def shown_so_far(text: str, names: Collection[str]) -> int:
    """Number of leading characters of an unfinished completion that are certainly text outside of its calls."""
    begun = text.lstrip()
    if not names:
        return len(text)
    starts = (*_OPENINGS, *names)
    if not begun or any(begun.startswith(start) or start.startswith(begun) for start in starts):
        return 0
    return len(text[: before_tag(text)].rstrip())


def before_tag(text: str) -> int:
    """Number of leading characters before the tag of a call, also where only its beginning ends the text."""
    place = text.find(_TAG)
    if place < 0:
        sizes = range(min(len(_TAG) - 1, len(text)), 0, -1)
        place = len(text) - next((size for size in sizes if _TAG.startswith(text[-size:])), 0)
    return place if place == len(text) else len(text[:place].rstrip())


def _calls(text: str, names: Collection[str]) -> Iterator[ToolCall]:
    """The calls of which a text consists.

    Raises:
        ValueError: when the text contains anything else.
    """
    rest = _BETWEEN.sub("", text, count=1)
    while rest:
        if (named := _RECIPIENT.match(rest) or _NAME.match(rest)) is not None:
            arguments, end = _DECODER.raw_decode(rest, named.end())
            yield _call({"name": named[1], "arguments": arguments}, names)
        else:
            value, end = _DECODER.raw_decode(rest)
            for call in value if isinstance(value, list) else [value]:
                yield _call(call, names)
        rest = _BETWEEN.sub("", rest[end:], count=1)


def _call(value: Any, names: Collection[str]) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        raise ValueError("a call names a function that is offered")
    given = value.get("arguments")
    arguments = read_arguments(value.get("parameters") if given is None else given)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    return ToolCall(value["name"], arguments)
