"""Validates and normalises the messages and tools of a row; a message keeps all its keys.

Data sets store the same content in different ways: text as a list of parts, a tool call flat or under `function`, its
arguments as a mapping or as JSON text, missing keys as null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.images.expansion import IMAGE_MARK, IMAGES_KEY
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.runtime.observability.logs import shortened

Message = dict[str, Any]
"""`role`, `content` (text; may be missing with tool calls), and other keys that the chat template may read."""
Tools = list[dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
CONVERTED_ROLES = ("tool_call", "function_call", "tool_response")
"""Roles of calls and results that only a conversion reads (ms-swift, ShareGPT)."""
RESULT_ROLES = ("tool", "function", "ipython", "observation")
"""Roles of the results of tool calls."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""The keys under which data sets store the reasoning of an assistant turn."""
_INLINE_REASONING = re.compile(r"\s*(?:<think>)?(?P<reasoning>(?:(?!<think>).)*?)</think>\s*(?P<answer>.*)", re.DOTALL)
METADATA_KEYS = ("id", "message_id", "index", "name", "tool_call_id", "timestamp", "created_at", "model")
"""Keys that describe a turn and are not part of its text: a template need not render them."""
WEIGHT_KEY = "weight"
"""0 on an assistant turn without loss, 1 otherwise (OpenAI's fine-tuning format); never rendered."""
LOSS_KEYS = (WEIGHT_KEY, "train", "training", "loss", "loss_weight", "loss_scale")
"""The keys under which data sets store the weight (OpenAI, axolotl, ms-swift); a message that is read has the first."""
_DETAIL_KEYS = ("train_detail", "training_detail")
"""The keys under which axolotl stores which characters of a turn carry loss."""
_CONVERT = "convert the row with hybrid-rlhf data convert"
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are its text (OpenAI)."""
_IMAGE_PARTS = ("image", "image_url")


def is_learned(message: Message) -> bool:
    """Return True if a turn carries loss: an assistant turn, unless its weight is 0."""
    return message["role"] == "assistant" and message.get(WEIGHT_KEY, 1) != 0


def split_reasoning(message: Message) -> tuple[str, Message]:
    """The reasoning of an assistant turn, from its key or from the beginning of its content, and the turn without it;
    no text if there is none."""
    keys = [key for key in REASONING_KEYS if message.get(key)]
    if keys:
        return str(message[keys[0]]).strip(), {key: value for key, value in message.items() if key not in keys}
    match = _INLINE_REASONING.fullmatch(message.get("content") or "") if message["role"] == "assistant" else None
    return ("", message) if match is None else (match["reasoning"].strip(), {**message, "content": match["answer"]})


def continued_turn(prompt: Sequence[Message], completion: Sequence[Message]) -> int | None:
    """The index of a prompt's last turn if a completion continues it: both are the assistant's."""
    both = prompt and completion and prompt[-1]["role"] == completion[0]["role"] == "assistant"
    return len(prompt) - 1 if both else None


def read_message(location: str, message: Any, *, with_images: bool = False) -> Message:
    """Normalise a message: omit nulls and weights of 1, join parts of text, bring tool calls into one format.

    Args:
        location: beginning of errors.
        message: a message as it is stored.
        with_images: read parts that are images, which are refused otherwise; see `IMAGES_KEY`.

    Raises:
        UserError: naming `location`, if it is not a message or is empty.
    """
    if not isinstance(message, dict) or "role" not in message:
        raise UserError(f"{location}: a message must have 'role' and 'content', got {message!r}: fix the row")
    if message["role"] not in ROLES:
        fix = _CONVERT if message["role"] in CONVERTED_ROLES else "fix the row"
        raise UserError(f"{location}: a role must be one of {', '.join(ROLES)}, got {message['role']!r}: {fix}")
    given = {key: value for key, value in message.items() if value is not None}
    read = {key: value for key, value in given.items() if key not in LOSS_KEYS}
    if _weight(location, given) == 0 and read["role"] == "assistant":
        read[WEIGHT_KEY] = 0
    read |= {key: _content(location, read, key) for key in REASONING_KEYS if isinstance(read.get(key), list)}
    if "tool_calls" in read:
        read["tool_calls"] = [
            _tool_call(location, call) for call in _listed(location, "tool_calls", read["tool_calls"])
        ]
        if not read["tool_calls"]:
            del read["tool_calls"]
    images: list[Any] | None = [] if with_images else None
    content = _content(location, read, images=images)
    if read["role"] == "assistant" and "tool_calls" in read and not content.strip():
        return {key: value for key, value in read.items() if key != "content"}
    if "content" not in read:
        raise UserError(f"{location}: a message must have a 'content' other than null, got {message!r}: fix the row")
    read["content"] = content
    if images:
        read[IMAGES_KEY] = images
    if read["role"] in ("user", "assistant") and not read["content"].strip():
        raise UserError(
            f"{location}: the content of {'an' if read['role'] == 'assistant' else 'a'} {read['role']} turn must not "
            f"be empty, got {read['content']!r}: fill it or remove the row"
        )
    return read


def with_ordered_results(location: str, messages: Sequence[Message]) -> list[Message]:
    """Messages with the results of each turn's calls in the order of the calls, and with their names: chat templates
    pair them by either.

    Raises:
        UserError: naming `location`, if the call of a result cannot be found by `tool_call_id`, name or order.
    """
    ordered: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        ordered.append(message)
        place += 1
        calls = message.get("tool_calls") if message["role"] == "assistant" else None
        if not calls:
            continue
        results = list(takewhile(lambda later: later["role"] in RESULT_ROLES, messages[place:]))
        place += len(results)
        owners = _calls_of_results(location, calls, results) if results else []
        for owner, result in sorted(zip(owners, results, strict=True), key=lambda pair: pair[0] or 0):
            name = {} if owner is None else {"name": calls[owner]["function"]["name"]}
            ordered.append({"role": result["role"], **name, **result})
    return ordered


def _calls_of_results(location: str, calls: Sequence[Any], results: Sequence[Message]) -> list[int | None]:
    """The index of each result's call; None for one result, without id and name, of several calls."""
    ids = [call.get("id") for call in calls]
    given = [result.get("tool_call_id") for result in results]
    owners = [None if identity is None or identity not in ids else ids.index(identity) for identity in given]
    known = [identity for identity in ids if identity is not None]
    found = [owner for owner in owners if owner is not None]
    has_strange = None not in ids and any(identity not in [None, *ids] for identity in given)
    if len(set(found)) < len(found) or len(set(known)) < len(known) or has_strange:
        raise _unpaired_error(location, ids, given)
    free = [index for index in range(len(calls)) if index not in found]
    rest = [index for index, owner in enumerate(owners) if owner is None]
    offered = [calls[index]["function"]["name"] for index in free]
    names = [results[index].get("name") for index in rest]
    if len(set(offered)) == len(offered) and len(set(names)) == len(names) and set(names) <= set(offered):
        pairs = {index: free[offered.index(name)] for index, name in zip(rest, names, strict=True)}
    elif len(rest) == len(free) and (
        len(free) == 1 or all(name in (None, called) for name, called in zip(names, offered, strict=True))
    ):
        pairs = dict(zip(rest, free, strict=True))
    elif len(results) == 1 and names == [None] and not known:
        pairs = {}
    else:
        raise _unpaired_error(location, ids, given)
    return [pairs.get(index, owner) for index, owner in enumerate(owners)]


def _unpaired_error(location: str, ids: Sequence[Any], given: Sequence[Any]) -> UserError:
    return UserError(
        f"{location}: each result of a turn's tool calls must have the 'tool_call_id' of one of them, got {given} for "
        f"calls with 'id' {list(ids)}: fix the ids or remove the row"
    )


def row_tools(location: str, row: Row) -> Tools | None:
    """The functions that the assistant may call, from the column `tools`: a list of JSON schemas or one schema, each,
    or the whole, possibly as JSON text."""
    tools = _parsed(row.get("tools"))
    if tools is None or tools in ("", []):
        return None
    tools = [tools] if isinstance(tools, dict) and tools else tools
    tools = [_parsed(tool) for tool in _listed(location, "tools", tools)]
    if not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{location}: column 'tools' must contain JSON schemas, got {tools!r}: fix the row")
    return [_tool(tool) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose parameters may be JSON text (axolotl)."""
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _tool(tool["function"])}
    return {**tool, "parameters": _parsed(tool["parameters"])} if "parameters" in tool else tool


def _weight(location: str, message: Message) -> int:
    """The weight of a turn, by default 1; for turns that are not the assistant's, keys that say "no loss" say nothing.

    Only `weight` is a number alone: the other keys are true or false in the formats that define them.
    """
    detail = next((key for key in _DETAIL_KEYS if message.get(key)), None)
    if detail is not None and message["role"] == "assistant":
        raise _partial_loss_error(location, f"{detail!r} {message[detail]!r}")
    given = {key: message[key] for key in LOSS_KEYS if key in message}
    for key, value in given.items():
        is_flag = isinstance(value, bool) and key != WEIGHT_KEY
        if not is_flag and (isinstance(value, bool) or value not in (0, 1)):
            rule = "the weight of a turn must be 0 or 1" if key == WEIGHT_KEY else f"{key!r} must be true or false"
            raise UserError(f"{location}: {rule}, got {value!r}: fix or remove it")
        if message["role"] != "assistant" and (value or key == WEIGHT_KEY):
            kind = "a weight" if key == WEIGHT_KEY else f"loss ({key!r})"
            raise UserError(
                f"{location}: only assistant turns have {kind}, got {value!r} for a turn of the {message['role']}: "
                "remove it"
            )
    if len({int(value) for value in given.values()}) > 1:
        raise UserError(f"{location}: keys of a turn's loss must agree, got {given}: remove all but one")
    return next((int(value) for value in given.values()), 1)


def _content(location: str, message: Message, key: str = "content", images: list[Any] | None = None) -> str:
    """The text of a message, which may be a list of parts; images are appended to a list, if there is one."""
    content = message.get(key, "")
    parts = [part if isinstance(part, dict) else {} for part in content] if isinstance(content, list) else []
    if message["role"] == "assistant" and any(part.get(flag) in (False, 0) for part in parts for flag in LOSS_KEYS):
        raise _partial_loss_error(location, f"{key} {content!r}")
    if images is not None:
        images += [_image(location, part) for part in parts if part.get("type") in _IMAGE_PARTS]
        parts = [{"text": IMAGE_MARK} if part.get("type") in _IMAGE_PARTS else part for part in parts]
    if isinstance(content, list) and all(
        isinstance(part.get("text"), str) and part.get("type", "text") in _TEXT_PARTS for part in parts
    ):
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        fix = _CONVERT if {"tool_use", "tool_result"} & {str(part.get("type")) for part in parts} else "fix the row"
        raise UserError(
            f"{location}: the {key} of a message must be text or a list of {{'type': 'text', 'text': ...}}, got "
            f"{content!r}: {fix}"
        )
    return content


def _image(location: str, part: dict[str, Any]) -> Any:
    """The image of a part of a content; None if it is one of the row's column."""
    if part["type"] == "image" and part.keys() <= {"type", "image"}:
        return part.get("image")
    linked = part.get("image_url")
    url = linked.get("url") if isinstance(linked, dict) else linked
    if part["type"] == "image" or not isinstance(url, str):
        raise UserError(
            f"{location}: a part with an image must be {{'type': 'image'}}, with the key 'image' unless it is one of "
            f"the row's column, or {{'type': 'image_url', 'image_url': {{'url': ...}}}}, got keys "
            f"{', '.join(map(repr, part))}: fix the row"
        )
    if not url.startswith("data:"):
        raise UserError(f"{location}: image_url.url must be a data URI, got {shortened(url)!r}: send the image itself")
    return url


def _partial_loss_error(location: str, got: str) -> UserError:
    return UserError(
        f"{location}: a turn carries loss as a whole, got parts without loss in {got}: remove their marks, or give the "
        "text before the parts with loss as a prompt that ends with the assistant"
    )


def _tool_call(location: str, call: Any) -> dict[str, Any]:
    """A tool call as {'type', 'function': {'name', 'arguments'}}, with arguments as a mapping."""
    call = {key: value for key, value in call.items() if value is not None} if isinstance(call, dict) else {}
    if "function" not in call and "name" in call:
        named = {key: call.pop(key) for key in ("name", "arguments") if key in call}
        call["function"] = named
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{location}: a tool call must be {{'function': {{'name': ..., 'arguments': ...}}}}, got {call!r}: "
            "fix the row"
        )
    arguments = read_arguments(function.get("arguments"))
    if not isinstance(arguments, dict):
        raise UserError(
            f"{location}: the arguments of a tool call must be a mapping or its JSON text, got "
            f"{function['arguments']!r}: fix the row"
        )
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def read_arguments(value: Any) -> Any:
    """The arguments of a call, which may be JSON text; null, also as text, and no text are no arguments.

    Returns:
        A mapping; what is no mapping is returned as it is read.
    """
    parsed = _parsed(value.strip() if isinstance(value, str) else value)
    return {} if parsed in (None, "") else parsed


def _listed(location: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{location}: {name} must be a list, got {type(value).__name__}: fix the row")
    return value


def _parsed(value: Any) -> Any:
    """The value of JSON text; other values, and text that is not JSON, unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
