"""Tokenises completions that consist of steps, and finds the token at which each step ends.

The completion is one turn whose steps are joined by a separator. A step ends at the last token that contains one of its
characters. The last step ends with the conversation, where RL reads the score of a completion.

Source: Lightman et al. 2023, "Let's Verify Step by Step" (arXiv 2305.20050), section 2.6.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.conversation import completion_parts, continuation
from hybrid_rlhf.data.chat.messages import Message, Tools
from hybrid_rlhf.data.chat.template import token_ids
from hybrid_rlhf.data.chat.unrendered import unrendered
from hybrid_rlhf.data.images.expansion import NO_IMAGES, ImageRules, RowImages, is_whole, stored_columns
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import read_stepwise_row
from hybrid_rlhf.runtime.observability.logs import shortened

SEPARATOR_KEY = "step_separator"
"""Key in config.json of a process reward model."""


@dataclass(frozen=True)
class StepwiseTokens:
    """A tokenised prompt with a completion that consists of steps."""

    input_ids: list[int]
    ends: list[int]
    """Indices of the tokens that end a step."""
    first: int
    """Index of the first token of the completion."""
    overlap: int | None = None
    """The first step, counted from 1, whose last token contains a character of the next step; None if there is none."""


def encode_stepwise_row(
    location: str,
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    *,
    separator: str,
    images: ImageRules = NO_IMAGES,
) -> list[dict[str, Any]]:
    """Columns `responses` (one, with its prompt), `masks`, `ends` (indices of the tokens that end a step), `labels`.

    A row over the limit loses the beginning of its prompt first, then its last steps.

    Raises:
        UserError: if the tokenizer or the chat template does not show where steps end.
    """
    record = read_stepwise_row(location, row, refusal=images.refusal)
    given = images.read(location, record.images)
    if any(separator in step for step in record.steps):
        raise UserError(
            f"{location}: a step must not contain objective.step_separator {separator!r}, which would divide it in "
            "two: set another separator"
        )
    try:
        tokens = _encode(record.prompt, record.steps, tokenizer, separator, record.tools, given)
        if tokens.overlap is not None:
            raise UserError(
                f"objective.step_separator must separate tokens of different steps, with {separator!r} a token spans "
                f"step {tokens.overlap} and the next: set another separator"
            )
    except UserError as error:
        raise UserError(f"{location}: {error}") from error
    full_length = len(tokens.input_ids)
    surplus = max(0, min(tokens.first, full_length - limit))
    ids = tokens.input_ids[surplus:][:limit]
    ends = [end - surplus for end in tokens.ends if end - surplus < limit]
    columns = {
        "responses": [ids],
        "masks": [[i >= tokens.first - surplus for i in range(len(ids))]],
        "ends": ends,
        "labels": record.labels[: len(ends)],
        "length": len(ids),
        "tokens": len(ids),
        "full_length": full_length,
        "cut": full_length > limit,
        "usable": bool(ends) and is_whole(tokens.input_ids, ids, given),
        "ignored": json.dumps(unrendered(record.prompt, tokenizer, record.tools, learn_from=len(record.prompt))),
    }
    return [columns | stored_columns(given)]


def encode_steps(
    prompt: list[Message],
    completion: str,
    tokenizer: PreTrainedTokenizerBase,
    separator: str,
    tools: Tools | None = None,
) -> StepwiseTokens:
    """Tokenise any completion and split it at separators; blank parts are not steps.

    Raises:
        UserError: if the tokenizer or the chat template does not show where steps end.
    """
    steps = completion.split(separator)
    tokens = _encode(prompt, steps, tokenizer, separator, tools)
    shown = [end for step, end in zip(steps, tokens.ends, strict=True) if step.strip()]
    return StepwiseTokens(tokens.input_ids, [*shown[:-1], tokens.ends[-1]], tokens.first)


def _encode(
    prompt: list[Message],
    steps: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    separator: str,
    tools: Tools | None,
    images: RowImages | None = None,
) -> StepwiseTokens:
    if not tokenizer.is_fast:
        raise UserError(
            f"process rewards need a fast tokenizer, which gives character offsets, got {type(tokenizer).__name__}: "
            "use a fast one"
        )
    completion = separator.join(steps)
    before, generated = completion_parts(prompt, {"role": "assistant", "content": completion}, tokenizer, tools=tools)
    if images is not None:
        before, generated = images.expanded([before, generated])
    start = generated.find(completion)
    if start < 0:
        raise UserError(
            f"the chat template must render a completion with steps unchanged, got {shortened(generated)!r}: strip "
            "leading and trailing whitespace from the steps"
        )
    ids = token_ids(before, tokenizer)
    first = len(ids)
    tokens, ranges = continuation(before, generated, tokenizer)
    if images is not None:
        images.require_no_others([*ids, *tokens], len(images.references), tokenizer)
    offsets = [*[(0, 0)] * first, *ranges]
    ends = []
    overlap = None
    token = 0
    for number, step in enumerate(steps, start=1):
        stop = start + len(step)
        while token + 1 < len(offsets) and offsets[token + 1][0] < stop:
            token += 1
        start = stop + len(separator)
        if number < len(steps) and overlap is None and offsets[token][1] > start:
            overlap = number
        ends.append(token)
    ends[-1] = len(offsets) - 1
    return StepwiseTokens([*ids, *tokens], ends, first, overlap)
