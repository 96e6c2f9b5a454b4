"""Converts tool calls as data sets write them to messages with `tool_calls` and turns of the role `tool`.

| style | a call | a result |
|---|---|---|
| OpenAI | `tool_calls`, arguments as JSON text | role `tool` |
| OpenAI, earlier | `function_call` of a message | role `function` |
| ShareGPT | a turn from `function_call`: JSON text of one call or a list | a turn from `observation` |
| ms-swift | a turn of the role `tool_call`: JSON text of one call | role `tool_response` |
| Hermes | `<tool_call>` around JSON in the text | `<tool_response>` in the text of a `tool` turn |
| Anthropic | a part `tool_use` of the content | a part `tool_result` of the content of a user turn |

`read_message` then parses arguments in JSON text. Turns of calls join the assistant turn before them. Results are in
the order of their calls and get their names, which some chat templates read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import (
    CONVERTED_ROLES,
    LOSS_KEYS,
    WEIGHT_KEY,
    Message,
    Tools,
    read_message,
    row_tools,
    with_ordered_results,
)
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.runtime.observability.logs import shortened

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_OPEN_CALL = "<tool_call>"
_LISTED_TOOLS = "<tools>"
*CALL_ROLES, _RESULT_ROLE = CONVERTED_ROLES
"""Roles of turns that consist of calls, and that of a result."""


def read_calls(location: str, text: Any) -> list[Any]:
    """The calls in JSON text: one, or a list.

    Raises:
        UserError: if it is not JSON.
    """
    calls = _value(location, text) if isinstance(text, str) else text
    return calls if isinstance(calls, list) else [calls]


def with_tool_calls(location: str, messages: Sequence[Any]) -> list[Message]:
    """Messages with calls and results in one style.

    Raises:
        UserError: naming `location`, for an invalid message, or a call that is not JSON.
    """
    read: list[Message] = []
    for message in messages:
        turns = [read_message(location, turn) for turn in _turns(location, message)]
        is_call = isinstance(message, dict) and message.get("role") in CALL_ROLES
        if is_call and read and read[-1]["role"] == "assistant":
            turns = [_joined(location, read.pop(), turns[0], marked=any(key in message for key in LOSS_KEYS))]
        read += turns
    return with_ordered_results(location, read)


def _joined(location: str, before: Message, call: Message, *, marked: bool) -> Message:
    """An assistant turn and the turn of calls that follows it, as one; calls without a mark of loss have that of the
    calls before."""
    weights = [turn.get(WEIGHT_KEY) for turn in (before, call)]
    if weights[0] != weights[1] and (marked or "content" in before):
        raise UserError(
            f"{location}: a turn carries loss as a whole, got another mark of loss on its calls than on its text or "
            "earlier calls: remove one"
        )
    return {**call, **before, "tool_calls": [*before.get("tool_calls", ()), *call["tool_calls"]]}


def tools_column(location: str, row: Row, messages: Sequence[Message]) -> dict[str, Tools]:
    """The column `tools` of a row, from its columns `tools` or `functions`; {} if there are none.

    A system prompt that lists the tools, as in Hermes, needs no column: the chat template would list them twice.

    Raises:
        UserError: if it is not a list of JSON schemas.
    """
    column = row.get("tools") or row.get("functions")
    if row.get("tools") and row.get("functions"):
        raise UserError(f"{location}: a row has a column 'tools' or 'functions', got both: remove one")
    tools = _value(location, column) if isinstance(column, str) and column.strip() else column
    listed = any(m["role"] == "system" and _LISTED_TOOLS in m.get("content", "") for m in messages)
    if not tools or listed:
        return {}
    tools = [tools] if isinstance(tools, dict) else tools
    if isinstance(tools, list):
        tools = [_value(location, tool) if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"{location}: column 'tools' must be a list of JSON schemas, got {shortened(str(tools))}: fix the row"
        )
    tools = row_tools(location, {"tools": tools})
    return {"tools": [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()]}


def _turns(location: str, message: Any) -> list[Any]:
    """A message with its calls as `tool_calls`; several turns for several results in one text."""
    if not isinstance(message, dict):
        return [message]
    role = message.get("role")
    content = message.get("content")
    if role in CALL_ROLES:
        rest = {key: value for key, value in message.items() if key != "content"}
        return [{**rest, "role": "assistant", "tool_calls": read_calls(location, content)}]
    if role in ("function", _RESULT_ROLE):
        role = "tool"
        message = {**message, "role": role}
    if message.get("function_call"):
        if message.get("tool_calls"):
            raise UserError(f"{location}: a message has 'tool_calls' or 'function_call', got both: remove one")
        calls = read_calls(location, message["function_call"])
        message = {key: value for key, value in message.items() if key != "function_call"} | {"tool_calls": calls}
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return _turns_of_parts(location, message, content)
    if not isinstance(content, str):
        return [message]
    if role == "assistant" and _OPEN_CALL in content:
        return [_with_calls_of_text(location, message, content)]
    results = _RESULT.findall(content) if role == "tool" else []
    if results and _RESULT.sub("", content).strip():
        raise UserError(
            f"{location}: a turn with <tool_response> must have no other text, got {shortened(content)!r}: fix the row"
        )
    return [{**message, "content": result.strip()} for result in results] or [message]


def _turns_of_parts(location: str, message: Message, parts: list[dict[str, Any]]) -> list[Message]:
    """A message whose content has Anthropic's parts of calls or results, as a turn per result and one for the rest."""
    results, uses = ([part for part in parts if part.get("type") == kind] for kind in ("tool_result", "tool_use"))
    others = [part for part in parts if part not in results and part not in uses]
    role = message.get("role")
    if parts != [*results, *others, *uses] or (results and role != "user") or (uses and role != "assistant"):
        raise UserError(
            f"{location}: text precedes the tool_use parts of an assistant turn and follows the tool_result parts of a "
            f"user turn, got {', '.join(str(part.get('type')) for part in parts)} of the {role}: fix the row"
        )
    turns: list[Message] = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content", "")}
        | {key: value for key, value in part.items() if value and key not in ("type", "tool_use_id", "content")}
        for part in results
    ]
    if uses:
        calls = [{"id": use.get("id"), "name": use.get("name"), "arguments": use.get("input")} for use in uses]
        message = {**message, "tool_calls": [*(message.get("tool_calls") or ()), *calls]}
    return [*turns, {**message, "content": others}] if others or not results else turns


def _with_calls_of_text(location: str, message: Message, content: str) -> Message:
    calls = [call for text in _CALL.findall(content) for call in read_calls(location, text)]
    text, *later = _CALL.split(content)[::2]
    if _OPEN_CALL in text or any(map(str.strip, later)):
        raise UserError(
            f"{location}: each <tool_call> must end with </tool_call>, and no text follows it, got "
            f"{shortened(content)!r}: fix the row"
        )
    return {**message, "content": text.strip(), "tool_calls": [*(message.get("tool_calls") or ()), *calls]}


def _value(location: str, text: str) -> Any:
    """The value of JSON text; some rows of Hermes have Python's notation instead."""
    text = text.strip()
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    raise UserError(f"{location}: tools and their calls must be JSON, got {shortened(text)!r}: fix the row")
