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
from hybrid_rlhf.data.preparation.conversion.records import pair_row
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import shared_prefix, text_column
from hybrid_rlhf.data.rows.published import SPEAKER, continues_dialogue, led
from hybrid_rlhf.runtime.observability.logs import shortened

_ROLES = {"Human": "user", "Assistant": "assistant"}


def dialogue_pair(location: str, row: Row) -> Row:
    """The pair of a row."""
    chosen, rejected = (dialogue_turns(location, row, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise UserError(
            f"{location}: columns 'chosen' and 'rejected' must differ, both are {shortened(row['chosen'])!r}: change "
            "one or remove the row"
        )
    shared = shared_prefix(chosen, rejected)
    if not shared:
        raise UserError(
            f"{location}: columns 'chosen' and 'rejected' must begin with the same turn, the prompt, got "
            f"{shortened(chosen[0]['content'])!r} and {shortened(rejected[0]['content'])!r}: fix or remove the row"
        )
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if len(turns) == shared:
            raise UserError(
                f"{location}: column {name!r} must have a turn after those that 'chosen' and 'rejected' share, got "
                "none: fix or remove the row"
            )
    return pair_row(chosen[:shared], chosen[shared:], rejected[shared:])


def dialogue_turns(location: str, row: Row, name: str, *, ends_open: bool = False) -> list[Message]:
    """The turns of a dialogue in a column.

    Args:
        location: location of the row.
        row: the row.
        name: name of the column.
        ends_open: true if the dialogue ends where the assistant speaks next.

    Raises:
        UserError: if it is no such dialogue, or a turn is empty.
    """
    text = text_column(location, row, name)
    if ends_open:
        text = re.sub(r"\s*Assistant:\s*\Z", "", text)
    elif continues_dialogue(row):
        text = row["prompt"] + text
    before, *parts = SPEAKER.split(led(text))
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
