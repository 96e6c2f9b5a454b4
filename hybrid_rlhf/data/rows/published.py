"""Recognises published formats by the columns of a row; preparation/conversion/ converts them to rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hybrid_rlhf.configs.commands.data import FormatName
from hybrid_rlhf.data.rows.files import Row, without_nulls
from hybrid_rlhf.runtime.files.reading import NotJSON, parse_json

SPEAKER = re.compile(r"\n\n(Human|Assistant):")
"""Beginning of a turn in a dialogue that is written as text."""
_OPEN = re.compile(r"\n\nAssistant:\s*\Z")
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Columns of OpenAI's format that may have messages."""
PREFERRED = ("preferred_output", "non_preferred_output")
"""Columns of OpenAI's preferences."""

LABELS = ("label", "kto_tag")
"""Columns that say whether the last answer is desirable: TRL, ms-swift; LLaMA-Factory."""
REJECTED = ("rejected_response", "rejected_messages")
"""Columns of ms-swift with the answer to which the last turn is preferred: its text, or a conversation."""
SHARED = ("conversations", "conversation", "messages")
"""Columns of ShareGPT's turns; LLaMA-Factory, axolotl and ms-swift also give them other names."""
SYSTEM = ("system", "system_prompt")
"""Columns with the system prompt of a row, beside its turns."""
OPENING = (*SYSTEM, "history")
"""Columns with turns that come before those of other columns."""
CONVERTED = (*OPENING, "functions")
"""Columns that steps do not read, but conversions."""
QUERIES = ("query", "instruction", "question", "problem", "input")
"""Columns with the user's text, in any case (ms-swift, axolotl)."""
REPLIES = ("response", "output", "answer", "target", "targets", "answer_key", "answers", "solution", "generation")
"""Columns with the answer to it."""
CHOSEN = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
"""Columns with the better and the worse answer to it."""

_TEXT_COLUMNS = (*MESSAGE_COLUMNS, *SHARED)
_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")


def with_messages(row: Row) -> Row:
    """The row, in which columns of messages that are JSON text, as in CSV, are lists."""
    lists = {name: messages for name in _TEXT_COLUMNS if (messages := _listed(row.get(name))) is not None}
    return row | lists if lists else row


def _listed(value: Any) -> list[Any] | None:
    """The messages or turns of JSON text; None for any other value."""
    if not isinstance(value, str) or not _LIST_OF_OBJECTS.match(value):
        return None
    try:
        content = parse_json(value)
    except NotJSON:
        return None
    is_turns = isinstance(content, list) and all(
        isinstance(turn, dict) and {"role", "from"} & set(turn) for turn in content
    )
    return without_nulls(content) if is_turns else None


def is_dialogue(row: Row) -> bool:
    """Return True if a row has a pair of dialogues, or of continuations of one."""
    texts = [row.get("chosen"), row.get("rejected")]
    if not all(isinstance(text, str) for text in texts):
        return False
    return continues_dialogue(row) or all(SPEAKER.match(led(str(text))) for text in texts)


def continues_dialogue(row: Row) -> bool:
    """Return True if the column `prompt` is a dialogue in which the assistant speaks next."""
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not SPEAKER.match(led(prompt)) or not _OPEN.search(led(prompt)):
        return False
    return not any(SPEAKER.match(led(str(row.get(name)))) for name in ("chosen", "rejected"))


def led(text: str) -> str:
    """A dialogue with exactly one blank line before its first turn."""
    return f"\n\n{text.lstrip()}"


def is_sharegpt(row: Row) -> bool:
    """Return True if a row has a conversation of ShareGPT."""
    first = _first_keys(row, next((name for name in SHARED if name in row), ""))
    return "from" in first or (bool(first) and not {"messages", "prompt"} & set(row))


def is_openai(row: Row) -> bool:
    """Return True if a row has messages, or a preference in the format of OpenAI."""
    if "input" in row and set(PREFERRED) <= set(row):
        return True
    columns = [row[name] for name in MESSAGE_COLUMNS if name in row]
    return any(isinstance(value, list) for value in columns) or bool(columns and any(map(row.get, CONVERTED)))


def is_query(row: Row) -> bool:
    """Return True if a row has a text of the user with its answer, or with two, under names of other programs."""
    names = {name.lower() for name in row}
    if names & set(QUERIES) and not names & {"messages", "prompt"}:
        return bool(names & {*REPLIES, "completion"}) or any(set(pair) <= names for pair in CHOSEN)
    return "prompt" in names and bool(names & {"response", "generation", "chosen_response"})


def is_ultrafeedback(row: Row) -> bool:
    """Return True if a row has completions with scores."""
    return "instruction" in row and {"response"} <= _first_keys(row, "completions")


def is_nectar(row: Row) -> bool:
    """Return True if a row has a dialogue with ranked answers."""
    return "prompt" in row and {"answer", "rank"} <= _first_keys(row, "answers")


def _first_keys(row: Row, name: str) -> set[str]:
    """The keys of the first object in a list of objects."""
    values = row.get(name)
    return set(values[0]) if isinstance(values, list) and values and isinstance(values[0], dict) else set()


def has_columns(*forms: set[str]) -> Callable[[Row], bool]:
    """A predicate that is true for a row that has all columns of one of several forms."""
    return lambda row: any(form <= set(row) for form in forms)


def is_tree(row: Row) -> bool:
    """Return True if a row is a tree of messages, or one message of a tree."""
    is_message = {"message_id", "text", "role"} <= set(row)
    return is_message or (isinstance(row.get("prompt"), dict) and "replies" in row["prompt"])


MATCHES: dict[FormatName, Callable[[Row], bool]] = {
    "hh": is_dialogue,
    "sharegpt": is_sharegpt,
    "ultrafeedback": is_ultrafeedback,
    "alpaca": has_columns({"instruction", "output"}, {"instruction", "chosen", "rejected"}),
    "openassistant": is_tree,
    "helpsteer2": has_columns(
        {"prompt", "response", "helpfulness"}, {"prompt", "response_1", "response_2", "preference_strength"}
    ),
    "helpsteer3": has_columns({"context", "response1", "response2", "overall_preference"}),
    "nectar": is_nectar,
    "openai_comparisons": has_columns({"summaries", "choice"}, {"question", "answer_0", "answer_1"}),
    "query": is_query,
    "openai_messages": is_openai,
}
"""Predicates that recognise a row's format, in the order in which they are tried."""


def detected_format(row: Row) -> FormatName | None:
    """The first format that a row has."""
    return next((name for name, matches in MATCHES.items() if matches(row)), None)


def published_format(row: Row) -> FormatName | None:
    """The format that a row must be converted from; None if it has no such format, or messages that steps read.

    A question with its answer may be a row for SFT or, with other names, for RL: its format is not told.
    """
    detected = detected_format(row)
    if detected == "openai_messages":
        must_convert = {*REJECTED, "kto_tag"} & set(row) or set(PREFERRED) <= set(row) or answers_messages(row)
        return detected if must_convert or is_whole_completion(row) else None
    return None if detected == "query" else detected


def answers_messages(row: Row) -> bool:
    """Return True if a row has two answers to its messages (LLaMA-Factory, axolotl), not two conversations."""
    asked, said = ([value] if isinstance(value, dict) else value for value in (row.get("messages"), row.get("chosen")))
    if "prompt" in row or "rejected" not in row or not isinstance(asked, list) or not isinstance(said, list | str):
        return False
    if not asked or not said:
        return False
    roles = [turn.get("role") if isinstance(turn, dict) else "assistant" for turn in (asked[-1], said[0])]
    return roles == ["user", "assistant"]


def is_whole_completion(row: Row) -> bool:
    """Return True if a row has a labelled conversation as its completion, without a prompt (axolotl)."""
    return isinstance(row.get("completion"), list) and "label" in row and not {"prompt", "messages"} & set(row)
