"""Formats that list turns: ShareGPT, Alpaca and other questions with answers, and the messages of OpenAI; with them the
formats of LLaMA-Factory, ms-swift and axolotl.

ShareGPT: `conversations` with `from` and `value` or `role` and `content`, or objects of `human` and `assistant`; other
keys of a turn are kept, but weights of turns that are not the assistant's are ignored. Alpaca (Taori et al. 2023):
`instruction`, `input` and `output`; instruction and input are joined by a line break, as in LLaMA-Factory. Query: one
text of the user and its answer, under the names in published.py. OpenAI: `messages`, or for preferences `input`,
`preferred_output` and `non_preferred_output`. Each may have `tools`, `system` (or `system_prompt`) and `history`
(pairs), which precede its turns, and `chosen` and `rejected` in place of the last turn. In each, `label` or `kto_tag`
(LLaMA-Factory) makes the last turn a labelled completion, and `rejected_response` or `rejected_messages` (ms-swift) the
turns after the last question the chosen ones of a pair. Images (`images`, or LLaVA's `image`) stay as they are, and the
text marks them by `<image>`.
"""

from __future__ import annotations

from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import ROLES, WEIGHT_KEY, Message
from hybrid_rlhf.data.preparation.conversion.records import pair_row
from hybrid_rlhf.data.preparation.conversion.tool_calls import CALL_ROLES, tools_column, with_tool_calls
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import column, read_label, shared_prefix, text_column
from hybrid_rlhf.data.rows.placing import IMAGE_COLUMNS
from hybrid_rlhf.data.rows.published import (
    CHOSEN,
    LABELS,
    MESSAGE_COLUMNS,
    OPENING,
    PREFERRED,
    QUERIES,
    REJECTED,
    REPLIES,
    SHARED,
    SYSTEM,
    answers_messages,
    is_whole_completion,
)

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "observations": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    **{role: role for role in (*CALL_ROLES, *ROLES) if role != "observation"},
}


def sharegpt_row(location: str, row: Row) -> Row:
    """Convert a row of ShareGPT to a conversation, or to a pair."""
    name = next((name for name in SHARED if name in row), SHARED[0])
    place = f"{location}: column {name!r}"
    turns = [turn for given in column(location, row, name, list, "a list of turns") for turn in _shared(place, given)]
    messages = [*_opening(location, row, turns), *turns]
    completed = _completed(location, row, messages, _pair(location, row))
    if not any(message["role"] == "user" for message in messages):
        speakers = ", ".join(turn.get("from", turn.get("role")) for turn in row[name]) or "no turn"
        raise UserError(f"{place} must have a turn of the user, got {speakers}: add it or remove the row")
    return completed


def _shared(place: str, turn: Any) -> list[Message]:
    """The turn of an object with role and text, or the two of a question with its answer (ms-swift)."""
    if isinstance(turn, dict) and sorted(_ROLES.get(key, "") for key in turn) == ["assistant", "user"]:
        return sorted(({"role": _ROLES[key], "content": text} for key, text in turn.items()), key=_follows)
    speaker, content = (_named(place, turn, *names) for names in (("from", "role"), ("value", "content")))
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise UserError(f"{place}: 'from' must be one of {', '.join(_ROLES)}, got {speaker!r}: fix the row")
    dropped = ("from", "value", "role", "content", *([] if role in ("assistant", *CALL_ROLES) else [WEIGHT_KEY]))
    return [{"role": role, "content": content, **{key: value for key, value in turn.items() if key not in dropped}}]


def _follows(turn: Message) -> bool:
    return bool(turn["role"] == "assistant")


def _named(place: str, turn: Any, *names: str) -> Any:
    """The value that an object has under one of two names."""
    found = [turn[name] for name in names if name in turn] if isinstance(turn, dict) else []
    if not found and isinstance(turn, dict) and "content" in names and turn.get("tool_calls"):
        return None
    if not found or found.count(found[0]) != len(found):
        raise UserError(
            f"{place}: a turn must have 'from' and 'value', or 'role' and 'content', got {turn!r}: fix the row"
        )
    return found[0]


def query_row(location: str, row: Row) -> Row:
    """Convert a text of the user with its answer, also of Alpaca, to a conversation, or to a pair."""
    names = {name.lower(): name for name in row}
    asked = [names[name] for name in (*QUERIES, "prompt") if row.get(names.get(name, ""))]
    if {name.lower() for name in asked} == {"instruction", "input"}:
        question = "\n".join(text_column(location, row, names[name]) for name in ("instruction", "input"))
    else:
        question = text_column(location, row, _one_of(location, asked, "query" if "query" in names else "instruction"))
    messages = [*_opening(location, row, []), {"role": "user", "content": question}]
    pair = _pair(location, row)
    if not pair:
        said = [names[name] for name in (*REPLIES, "completion") if name in names]
        reply = _one_of(location, said, "output" if "instruction" in names else "response")
        messages.append(_reply(location, row, reply))
    return _completed(location, row, messages, pair)


def _one_of(location: str, found: list[str], usual: str) -> str:
    """The only column of those found, or the one that is named as ms-swift names it; the usual one if there is none."""
    named = [name for name in found if name in (QUERIES[0], REPLIES[0])] or found or [usual]
    if len(named) > 1:
        raise UserError(
            f"{location}: a row must have one question and one answer, got columns {', '.join(named)}: rename the "
            f"right one to {QUERIES[0]!r} or {REPLIES[0]!r} with --columns"
        )
    return named[0]


def _opening(location: str, row: Row, turns: list[Message]) -> list[Message]:
    """The turns of columns with the system prompt and the history, which come before the turns of other columns."""
    system = list(dict.fromkeys(text_column(location, row, name) for name in SYSTEM if row.get(name)))
    first = turns[0] if turns else {}
    if isinstance(first, dict) and first.get("role") in ("system", "developer"):
        system = [text for text in system if text != first.get("content")]
        if system or row.get("history"):
            raise UserError(
                f"{location}: a row has one system prompt before its history, got a turn of the system beside "
                f"{' and '.join(name for name in OPENING if row.get(name))}: remove one"
            )
    if len(system) > 1:
        raise UserError(f"{location}: columns {' and '.join(SYSTEM)} must agree, got {system}: remove one")
    messages: list[Message] = [{"role": "system", "content": text} for text in system]
    for pair in column(location, {"history": row.get("history") or []}, "history", list, "a list of pairs"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"{location}: column 'history' must have pairs of texts, got {pair!r}: fix the row")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


def _pair(location: str, row: Row) -> list[list[Any]]:
    """The turns of the better and the worse answer of a row; [] if it has none."""
    names = next((pair for pair in CHOSEN if set(pair) <= set(row)), ())
    return [_answer(location, row, name) for name in names]


def _answer(location: str, row: Row, name: str) -> list[Any]:
    """The turns of an answer: text, a turn or a list of turns."""
    if isinstance(row[name], str):
        return [_reply(location, row, name)]
    turns = [row[name]] if isinstance(row[name], dict) else column(location, row, name, list, "text or turns")
    return [turn for given in turns for turn in _shared(f"{location}: column {name!r}", given)]


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
        return _completed(location, inside, messages, replies)
    used = {"tools", "functions", *OPENING}
    first = next((name for name in ("messages", "prompt") if name in row), None)
    whole = "completion" if is_whole_completion(row) else "messages"
    opened = any(map(row.get, OPENING))
    converted = {
        name: _opened(location, row, name) if opened and first in (name, None) else row[name]
        for name in MESSAGE_COLUMNS
        if isinstance(row.get(name), list) or (opened and name == first)
    }
    judged = whole in row and (_label(location, row) is not None or any(row.get(name) for name in REJECTED))
    if judged or answers_messages(row):
        used |= {whole, *LABELS, *REJECTED, *(() if judged else CHOSEN[0])}
        messages = column(location, converted, whole, list, "a list of messages")
        completed = _completed(location, row, messages, [] if judged else _pair(location, row))
    else:
        turns = {name: with_tool_calls(f"{location}: column {name!r}", converted[name]) for name in converted}
        completed = turns | tools_column(location, row, next(iter(turns.values()), []))
    return {name: row[name] for name in row if name not in used} | completed


def _opened(location: str, row: Row, name: str) -> list[Any]:
    """The messages of a column after the turns of the columns that come before it."""
    asked = row[name]
    turns = column(
        location,
        {name: [{"role": "user", "content": asked}] if isinstance(asked, str) else asked},
        name,
        list,
        "text or messages",
    )
    return [*_opening(location, row, turns), *turns]


def _completed(location: str, row: Row, messages: list[Any], replies: list[list[Any]]) -> Row:
    """A conversation, or a pair if it has two replies, with the row's tools and margin."""
    turns = with_tool_calls(location, messages)
    others: Row = tools_column(location, row, turns) | {name: row[name] for name in IMAGE_COLUMNS if row.get(name)}
    if replies:
        chosen, rejected = (with_tool_calls(location, reply) for reply in replies)
        completed = pair_row(turns, chosen, rejected)
    else:
        completed = _judged(location, row, turns)
    if "rejected" in completed and "margin" in row:
        others["margin"] = row["margin"]
    return {**completed, **others}


def _judged(location: str, row: Row, turns: list[Message]) -> Row:
    """A conversation; with a label its last turn is a labelled completion, with a rejected answer its answer to the
    last question is the chosen one."""
    label = _label(location, row)
    rejected = [name for name in REJECTED if row.get(name)]
    if (label is not None) + len(rejected) > 1:
        raise UserError(
            f"{location}: a row has a label or a rejected answer, got {'' if label is None else f'label {label} and '}"
            f"{' and '.join(f'column {name!r}' for name in rejected)}: remove one"
        )
    if label is not None:
        return {"prompt": turns[:-1], "completion": turns[-1:], "label": label}
    if not rejected:
        return {"messages": turns}
    other = with_tool_calls(location, _answer(location, row, rejected[0]))
    if rejected[0] == "rejected_response":
        shared = max((place for place, turn in enumerate(turns, start=1) if turn["role"] == "user"), default=0)
        return pair_row(turns[:shared], turns[shared:], other)
    shared = shared_prefix(turns, other)
    return pair_row(turns[:shared], turns[shared:], other[shared:])


def _label(location: str, row: Row) -> bool | None:
    """The label of a row, if it has one.

    Raises:
        UserError: for a tag of another value; a column `label` may mean anything else.
    """
    labels = {name: read_label(value) for name, value in row.items() if name in LABELS}
    if labels.get("kto_tag", True) is None:
        raise UserError(f"{location}: column 'kto_tag' must be true or false, got {row['kto_tag']!r}: fix the row")
    name = next((name for name in reversed(LABELS) if labels.get(name) is not None), None)
    return None if name is None else read_label(row[name])
