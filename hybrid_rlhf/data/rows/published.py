"""Recognises published formats by the columns of a row; preparation/conversion/ converts them to rows."""

from __future__ import annotations

import re
from collections.abc import Callable

from hybrid_rlhf.configs.commands.data import FormatName
from hybrid_rlhf.data.rows.files import Row

SPEAKER = re.compile(r"\n\n(Human|Assistant):")
"""Beginning of a turn in a dialogue that is written as text."""
_OPEN = re.compile(r"\n\nAssistant:\s*\Z")
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Columns of OpenAI's format that may have messages."""
PREFERRED = ("preferred_output", "non_preferred_output")
"""Columns of OpenAI's preferences."""


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
    turns = row.get("conversations")
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]


def is_alpaca(row: Row) -> bool:
    """Return True if a row has an instruction with its output."""
    return "instruction" in row and ("output" in row or {"chosen", "rejected"} <= set(row))


def is_openai(row: Row) -> bool:
    """Return True if a row has messages, or a preference in the format of OpenAI."""
    if "input" in row and set(PREFERRED) <= set(row):
        return True
    return any(isinstance(row.get(name), list) for name in MESSAGE_COLUMNS)


def is_ultrafeedback(row: Row) -> bool:
    """Return True if a row has completions with scores."""
    completions = row.get("completions")
    scored = isinstance(completions, list) and bool(completions) and isinstance(completions[0], dict)
    return "instruction" in row and scored and "response" in row["completions"][0]


def is_comparison(row: Row) -> bool:
    """Return True if a row compares two summaries or two answers."""
    return {"summaries", "choice"} <= set(row) or {"question", "answer_0", "answer_1"} <= set(row)


def is_tree(row: Row) -> bool:
    """Return True if a row is a tree of messages, or one message of a tree."""
    is_message = {"message_id", "text", "role"} <= set(row)
    return is_message or (isinstance(row.get("prompt"), dict) and "replies" in row["prompt"])


MATCHES: dict[FormatName, Callable[[Row], bool]] = {
    "hh": is_dialogue,
    "sharegpt": is_sharegpt,
    "ultrafeedback": is_ultrafeedback,
    "alpaca": is_alpaca,
    "openassistant": is_tree,
    "openai_comparisons": is_comparison,
    "openai_messages": is_openai,
}
"""Predicates that recognise a row's format, in the order in which they are tried."""


def published_format(row: Row) -> FormatName | None:
    """The format that a row must be converted from; None if it has no such format, or messages that steps read."""
    detected = next((name for name, matches in MATCHES.items() if matches(row)), None)
    return None if detected == "openai_messages" and not set(PREFERRED) <= set(row) else detected
