"""Answers in steps to tokens: which token ends which step.

The answer is one turn, its steps parted by a separator. A step ends at the last token that has a character of it. The
last step ends with the conversation, where step 3 reads the score of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat import answer_parts
from hybrid_rlhf.data.messages import Message, Tools
from hybrid_rlhf.data.rows import stepwise_row
from hybrid_rlhf.data.sources import Row
from hybrid_rlhf.data.template import leading_bos, without_place

SEPARATOR_KEY = "step_separator"
"""Of config.json of a process reward model."""


@dataclass(frozen=True)
class Steps:
    """A conversation whose last answer has steps."""

    input_ids: list[int]
    ends: list[int]
    """Places of the tokens that end a step."""
    first: int
    """Place of the answer's first token."""
    overlap: int | None = None
    """The first step, from 1, whose last token has a character of the next; none does."""


def encode_stepwise_row(
    place: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int, *, separator: str
) -> list[dict[str, Any]]:
    """Columns `responses` (one, with its prompt), `masks`, `ends` (places of the tokens that end a step), `labels`.

    What is too long loses the beginning of its prompt, then its last steps.

    Raises:
        UserError: when the tokenizer or the chat template hides where steps end.
    """
    record = stepwise_row(place, row)
    if any(separator in step for step in record.steps):
        raise UserError(
            f"{place}: a step holds preference.step_separator {separator!r}, which would part it anew when it is "
            "scored: take another separator"
        )
    try:
        found = _encode(record.prompt, record.steps, tokenizer, separator, record.tools)
        if found.overlap is not None:
            raise UserError(
                f"a token reaches from step {found.overlap} over preference.step_separator {separator!r} into the "
                "next: take another separator"
            )
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    ids, ends, first = found.input_ids, found.ends, found.first
    cut = len(ids) > limit
    surplus = max(0, min(first, len(ids) - limit))
    ids, ends = ids[surplus:][:limit], [end - surplus for end in ends if end - surplus < limit]
    columns = {
        "responses": [ids],
        "masks": [[i >= first - surplus for i in range(len(ids))]],
        "ends": ends,
        "labels": record.labels[: len(ends)],
        "length": len(ids),
        "tokens": len(ids),
        "cut": cut,
        "usable": bool(ends),
        "ignored": ",".join(without_place(record.prompt, tokenizer, record.tools)),
    }
    return [columns]


def answer_steps(
    prompt: list[Message], answer: str, tokenizer: PreTrainedTokenizerBase, separator: str, tools: Tools | None = None
) -> Steps:
    """Any answer, as a model gave it: parted at separators, parts that are blank end no step.

    Raises:
        UserError: when the tokenizer or the chat template hides where steps end.
    """
    steps = answer.split(separator)
    found = _encode(prompt, steps, tokenizer, separator, tools)
    shown = [end for step, end in zip(steps, found.ends, strict=True) if step.strip()]
    return Steps(found.input_ids, [*shown[:-1], found.ends[-1]], found.first)


def _encode(
    prompt: list[Message], steps: Sequence[str], tokenizer: PreTrainedTokenizerBase, separator: str,
    tools: Tools | None,
) -> Steps:  # fmt: skip
    if not tokenizer.is_fast:
        raise UserError("steps need a tokenizer that tells where its tokens lie: take a fast one")
    answer = separator.join(steps)
    before, generated = answer_parts(prompt, {"role": "assistant", "content": answer}, tokenizer, tools=tools)
    text = before + generated
    start = text.find(answer, len(before))
    if start < 0:
        raise UserError("the chat template does not show an answer as it is, its steps cannot be found: strip them")
    encoding: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    bos = leading_bos(text, tokenizer)
    offsets = [*[(0, 0)] * len(bos), *encoding["offset_mapping"]]
    ends, overlap, token = [], None, 0
    for number, step in enumerate(steps, start=1):
        stop = start + len(step)
        while token + 1 < len(offsets) and offsets[token + 1][0] < stop:
            token += 1
        start = stop + len(separator)
        if number < len(steps) and overlap is None and offsets[token][1] > start:
            overlap = number
        ends.append(token)
    ends[-1] = len(offsets) - 1
    first = next((place for place, (_, stop) in enumerate(offsets) if stop > len(before)), len(offsets))
    return Steps([*bos, *encoding["input_ids"]], ends, first, overlap)
