"""Formats that list turns: ShareGPT, Alpaca, and the messages of OpenAI.

ShareGPT: `conversations` with `from` and `value`, optional `system` and `tools`; other keys of a turn are kept, but
weights of turns that are not the assistant's are ignored. Alpaca (Taori et al. 2023):
`instruction`, `input` and `output`, optional `history` (pairs) and `system`; instruction and input are joined by a line
break, as in LLaMA-Factory. Both may have `chosen` and `rejected` in place of the last turn. OpenAI: `messages`, or for
preferences `input`, `preferred_output` and `non_preferred_output`. In each, `label` or `kto_tag` (LLaMA-Factory) makes
the last turn a labelled completion, and `rejected_response` or `rejected_messages` (ms-swift) the chosen one of a pair.
"""

from __future__ import annotations

from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import WEIGHT_KEY, Message
from hybrid_rlhf.data.preparation.conversion.records import column, pair_row, text_column
from hybrid_rlhf.data.preparation.conversion.tool_calls import read_calls, tools_column, with_tool_calls
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import read_label, shared_prefix
from hybrid_rlhf.data.rows.published import LABELS, MESSAGE_COLUMNS, PREFERRED, REJECTED

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


def sharegpt_row(location: str, row: Row) -> Row:
    """Convert a row of ShareGPT to a conversation, or to a pair."""
    turns = column(location, row, "conversations", list, "a list of turns")
    system = row.get("system")
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    messages += [_shared_turn(f"{location}: column 'conversations'", turn) for turn in turns]
    replies = []
    if "chosen" in row and "rejected" in row:
        replies = [_shared_turn(f"{location}: column {name!r}", row[name]) for name in ("chosen", "rejected")]
    completed = _completed(location, row, messages, replies)
    if not any(message["role"] == "user" for message in messages):
        raise UserError(
            f"{location}: column 'conversations' must have a turn of the user, got "
            f"{', '.join(turn['from'] for turn in turns) or 'no turn'}: add it or remove the row"
        )
    return completed


def _shared_turn(place: str, turn: Any) -> Message:
    if not isinstance(turn, dict) or not {"from", "value"} <= set(turn):
        raise UserError(f"{place}: a turn must have 'from' and 'value', got {turn!r}: fix the row")
    role = _ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise UserError(f"{place}: 'from' must be one of {', '.join(_ROLES)}, got {turn['from']!r}: fix the row")
    content = "tool_calls" if turn["from"] == "function_call" else "content"
    dropped = ("from", "value", "role", content, *([] if role == "assistant" else [WEIGHT_KEY]))
    kept = {key: value for key, value in turn.items() if key not in dropped}
    value = read_calls(place, turn["value"]) if content == "tool_calls" else turn["value"]
    return {"role": role, content: value, **kept}


def alpaca_row(location: str, row: Row) -> Row:
    """Convert a row of Alpaca to a conversation, or to a pair."""
    messages: list[Message] = []
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": row["system"]})
    for pair in column(location, {**row, "history": row.get("history") or []}, "history", list, "a list of pairs"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"{location}: column 'history' must have pairs of texts, got {pair!r}: fix the row")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    instruction = text_column(location, row, "instruction")
    more = row.get("input") or ""
    if not isinstance(more, str):
        raise UserError(f"{location}: column 'input' must be text, got {type(more).__name__}: fix the row")
    messages.append({"role": "user", "content": f"{instruction}\n{more}" if more.strip() else instruction})
    if not {"chosen", "rejected"} <= set(row):
        return _completed(location, row, [*messages, _reply(location, row, "output")], [])
    return _completed(location, row, messages, [_reply(location, row, name) for name in ("chosen", "rejected")])


def _reply(location: str, row: Row, name: str) -> Message:
    return {"role": "assistant", "content": text_column(location, row, name)}


def openai_row(location: str, row: Row) -> Row:
    """The row with messages and tools in one style; other columns are kept."""
    if set(PREFERRED) <= set(row):
        inside = column(location, row, "input", dict, "an object with 'messages'")
        messages = column(f"{location}: column 'input'", inside, "messages", list, "a list of messages")
        replies = [column(location, row, name, list, "a list of one message") for name in PREFERRED]
        if any(len(reply) != 1 for reply in replies):
            raise UserError(f"{location}: columns {' and '.join(PREFERRED)} must have one message each: fix the row")
        return _completed(location, inside, messages, [reply[0] for reply in replies])
    if "messages" in row and (_label(location, row) is not None or any(row.get(name) for name in REJECTED)):
        used = ("messages", "tools", "functions", *LABELS, *REJECTED)
        others = {name: value for name, value in row.items() if name not in used}
        messages = column(location, row, "messages", list, "a list of messages")
        return others | _completed(location, row, messages, [])
    converted = dict(row)
    for name in MESSAGE_COLUMNS:
        if isinstance(row.get(name), list):
            converted[name] = with_tool_calls(f"{location}: column {name!r}", row[name])
    start: list[Message] = next(
        (converted[n] for n in ("messages", "prompt") if isinstance(converted.get(n), list)), []
    )
    other_columns = {name: value for name, value in converted.items() if name not in ("tools", "functions")}
    return other_columns | tools_column(location, row, start)


def _completed(location: str, row: Row, messages: list[Any], replies: list[Any]) -> Row:
    """A conversation, or a pair if it has two replies, with the row's tools."""
    turns = with_tool_calls(location, messages)
    tools = tools_column(location, row, turns)
    if not replies:
        return {**_judged(location, row, turns), **tools}
    chosen, rejected = (with_tool_calls(location, [reply]) for reply in replies)
    return {**pair_row(turns, chosen, rejected), **tools}


def _judged(location: str, row: Row, turns: list[Message]) -> Row:
    """A conversation; with a label its last turn is a labelled completion, with a rejected answer the chosen one."""
    label = _label(location, row)
    rejected = next((name for name in REJECTED if row.get(name)), None)
    if label is not None:
        if rejected is not None:
            raise UserError(
                f"{location}: a row has a label or a rejected answer, got label {label} and column {rejected!r}: "
                "remove one"
            )
        return {"prompt": turns[:-1], "completion": turns[-1:], "label": label}
    if rejected is None:
        return {"messages": turns}
    if rejected == "rejected_response":
        prompt = turns[:-1]
        other = with_tool_calls(location, [_reply(location, row, rejected)])
    else:
        whole = with_tool_calls(location, column(location, row, rejected, list, "a list of messages"))
        shared = shared_prefix(turns, whole)
        prompt, other = turns[:shared], whole[shared:]
    return pair_row(prompt, turns[len(prompt) :], other)


def _label(location: str, row: Row) -> bool | None:
    """The label of a row, if it has one.

    Raises:
        UserError: for a tag of another value; a column `label` may mean anything else.
    """
    tag = row.get("kto_tag")
    label = read_label(row.get("label") if tag is None else tag)
    if tag is not None and label is None:
        raise UserError(f"{location}: column 'kto_tag' must be true or false, got {tag!r}: fix the row")
    return label
