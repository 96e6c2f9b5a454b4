"""Converts tool calls as data sets write them to messages with `tool_calls` and turns of the role `tool`.

| style | a call | a result |
|---|---|---|
| OpenAI | `tool_calls`, arguments as JSON text | role `tool` |
| OpenAI, earlier | `function_call` of a message | role `function` |
| ShareGPT | a turn from `function_call`: JSON text of one call or a list | a turn from `observation` |
| Hermes | `<tool_call>` around JSON in the text | `<tool_response>` in the text of a `tool` turn |

`read_message` then parses arguments in JSON text. Results are in the order of their calls and get
their names, which some chat templates read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message, Tools, read_message, with_ordered_results
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.runtime.observability.logs import shortened

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_OPEN_CALL = "<tool_call>"
_LISTED_TOOLS = "<tools>"


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
    read = [read_message(location, turn) for message in messages for turn in _turns(location, message)]
    return with_ordered_results(location, read, named=True)


def tools_column(location: str, row: Row, messages: Sequence[Message]) -> dict[str, Tools]:
    """The column `tools` of a row, from its columns `tools` or `functions`; {} if there are none.

    A system prompt that lists the tools, as in Hermes, needs no column: the chat template would list them twice.

    Raises:
        UserError: if it is not a list of JSON schemas.
    """
    column = row.get("tools") or row.get("functions")
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
    return {"tools": [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]}


def _turns(location: str, message: Any) -> list[Any]:
    """A message with its calls as `tool_calls`; several turns for several results in one text."""
    if not isinstance(message, dict):
        return [message]
    if message.get("role") == "function":
        message = {**message, "role": "tool"}
    if message.get("function_call"):
        calls = read_calls(location, message["function_call"])
        message = {key: value for key, value in message.items() if key != "function_call"} | {"tool_calls": calls}
    content = message.get("content")
    if not isinstance(content, str):
        return [message]
    if message.get("role") == "assistant" and _OPEN_CALL in content:
        return [_with_calls_of_text(location, message, content)]
    results = _RESULT.findall(content) if message.get("role") == "tool" else []
    return [{**message, "content": result.strip()} for result in results] or [message]


def _with_calls_of_text(location: str, message: Message, content: str) -> Message:
    calls = [call for text in _CALL.findall(content) for call in read_calls(location, text)]
    text = _CALL.sub("", content)
    if _OPEN_CALL in text:
        raise UserError(
            f"{location}: each <tool_call> must end with </tool_call>, got {shortened(text)!r}: fix the row"
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
