"""HH-RLHF: `chosen` and `rejected` are whole dialogues as text, with turns after a blank line and `Human:` or
`Assistant:`.

Source: Bai et al. 2022, "Training a Helpful and Harmless Assistant with RLHF" (arXiv 2204.05862), and its published
data. The turns that both dialogues share are the prompt. In Dahoas/rm-static, the form of this data that DeepSpeed-Chat
reads, the dialogue up to the last `Assistant:` is the column `prompt`, and `chosen` and `rejected` continue it.
"""

from __future__ import annotations

import re

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.preparation.conversion.records import pair_row, text_column
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import shared_prefix
from hybrid_rlhf.runtime.observability.logs import shortened

_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_OPEN = re.compile(r"\n\nAssistant:\s*\Z")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(row: Row) -> bool:
    """Whether a row has a pair of dialogues, or of continuations of one."""
    texts = [row.get("chosen"), row.get("rejected")]
    if not all(isinstance(text, str) for text in texts):
        return False
    return _continues(row) or all(_SPEAKER.match(_led(str(text))) for text in texts)


def _continues(row: Row) -> bool:
    """Whether the column `prompt` is a dialogue in which the assistant speaks next."""
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not _SPEAKER.match(_led(prompt)) or not _OPEN.search(_led(prompt)):
        return False
    return not any(_SPEAKER.match(_led(str(row.get(name)))) for name in ("chosen", "rejected"))


def dialogue_pair(location: str, row: Row) -> Row:
    """The pair of a row."""
    chosen, rejected = (_turns(location, row, name) for name in ("chosen", "rejected"))
    shared = shared_prefix(chosen, rejected)
    return pair_row(chosen[:shared], chosen[shared:], rejected[shared:])


def _turns(location: str, row: Row, name: str) -> list[Message]:
    text = text_column(location, row, name)
    if _continues(row):
        text = row["prompt"] + text
    before, *parts = _SPEAKER.split(_led(text))
    if before or not parts:
        raise UserError(
            f"{location}: column {name!r} must begin with 'Human:' or 'Assistant:', got {shortened(text)!r}: fix it"
        )
    turns: list[Message] = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        if not content.strip():
            raise UserError(
                f"{location}: each turn of column {name!r} must have text, turn {len(turns) + 1} ({speaker}) has none: "
                "fix or remove the row"
            )
        turns.append({"role": _ROLES[speaker], "content": content.strip()})
    return turns


def _led(text: str) -> str:
    """A dialogue with exactly one blank line before its first turn."""
    return f"\n\n{text.lstrip()}"
