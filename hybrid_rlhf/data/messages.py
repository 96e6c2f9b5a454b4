"""Messages and tools of a row, checked and brought to one form; every key of a message is kept.

Data sets write one thing in several ways: text in parts, a tool call flat or under `function`, its arguments as a
mapping or as JSON text, keys that are missing as null.
"""

from __future__ import annotations

import json
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.sources import Row

Message = dict[str, Any]
"""`role`, `content` (text, or missing beside tool calls), and whatever else the chat template reads."""
Tools = list[dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which data sets keep what an assistant thought before it answered."""


def read_message(place: str, message: Any) -> Message:
    """A message as a chat template reads it: nulls left out, parts of text joined, tool calls in one form.

    Raises:
        UserError: naming `place`, when it is no message or says nothing.
    """
    if not isinstance(message, dict) or "role" not in message:
        raise UserError(f"{place}: a message is {{'role', 'content'}}, got {message!r}: fix the row")
    if message["role"] not in ROLES:
        raise UserError(f"{place}: a role is {', '.join(ROLES)}, got {message['role']!r}: fix the row")
    read = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in read:
        read["tool_calls"] = [_tool_call(place, call) for call in _listed(place, "tool_calls", read["tool_calls"])]
        if not read["tool_calls"]:
            del read["tool_calls"]
    if read["role"] == "assistant" and "tool_calls" in read and not _content(place, read).strip():
        return {key: value for key, value in read.items() if key != "content"}
    if "content" not in read:
        raise UserError(f"{place}: a message is {{'role', 'content'}}, got {message!r}: fix the row")
    read["content"] = _content(place, read)
    if read["role"] in ("user", "assistant") and not read["content"].strip():
        raise UserError(f"{place}: the content of a turn of the {read['role']} is empty: fill it or drop the row")
    return read


def row_tools(place: str, row: Row) -> Tools | None:
    """The functions that a row's assistant may call: a list of JSON schemas, or the JSON text of one."""
    tools = _parsed(row.get("tools"))
    if tools is None or tools in ("", []):
        return None
    tools = _listed(place, "tools", tools)
    if not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{place}: column 'tools' holds JSON schemas of functions, got {tools!r}: fix the row")
    return tools


def _content(place: str, message: Message) -> str:
    """The text of a message, which may be a list of parts."""
    content = message.get("content", "")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UserError(
            f"{place}: the content of a message is text, or a list of {{'type': 'text', 'text'}}, got {content!r}: "
            "fix the row"
        )
    return content


def _tool_call(place: str, call: Any) -> dict[str, Any]:
    """A call as {'type', 'function': {'name', 'arguments'}}; arguments are a mapping, or JSON text of one."""
    call = {key: value for key, value in call.items() if value is not None} if isinstance(call, dict) else {}
    if "function" not in call and "name" in call:
        named = {key: call.pop(key) for key in ("name", "arguments") if key in call}
        call["function"] = named
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{place}: a tool call is {{'function': {{'name', 'arguments'}}}}, got {call!r}: fix the row")
    arguments = function.get("arguments")
    arguments = {} if arguments in (None, "") else _parsed(arguments)
    if not isinstance(arguments, dict):
        raise UserError(
            f"{place}: the arguments of a tool call are a mapping or its JSON text, got {function['arguments']!r}: "
            "fix the row"
        )
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _listed(place: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{place}: {name} is a list, got a {type(value).__name__}: fix the row")
    return value


def _parsed(value: Any) -> Any:
    """What JSON text says; anything else, and text that is no JSON, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
