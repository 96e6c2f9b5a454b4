"""Encodes rows as columns of tokens, truncated to a length limit; one encoder per row format.

All encoders return the columns `length` (tokens), `full_length` (tokens before truncation), `cut` (true if the row was
truncated), `usable` (true if the rest can be trained on) and `ignored` (what the model does not see as it is: a list
of keys, with repetitions, as JSON, because Arrow columns have one type). For a model that reads images also `images`:
`input_ids` have their tokens, and a row that truncation would take some of them from is unusable.
"""

from __future__ import annotations

import json
import os.path
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, chain, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.conversation import (
    EncodedSequence,
    completion_rows,
    encode_conversation,
    encode_prompt,
    encode_segments,
    encode_text,
    head_tokens,
)
from hybrid_rlhf.data.chat.messages import continued_turn
from hybrid_rlhf.data.chat.template import has_value
from hybrid_rlhf.data.chat.unrendered import EARLIER_TURNS, refused, unrendered
from hybrid_rlhf.data.images.expansion import NO_IMAGES, ImageRules, is_whole, stored_columns
from hybrid_rlhf.data.rows.files import Row, json_value
from hybrid_rlhf.data.rows.formats import (
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    read_labelled_row,
    read_preference_row,
    read_prompt_row,
    read_sft_row,
)

EncodedRows = list[dict[str, Any]]
"""Rows of columns, encoded from one row of a source."""
Encode = Callable[..., EncodedRows]
"""From the location of a row, the row, the tokenizer and the length limit; `images`, by name, are its ImageRules."""
_MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "responses")


def encode_conversation_row(
    location: str,
    record: ConversationRow,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    images: ImageRules = NO_IMAGES,
) -> EncodedRows:
    """Encode a conversation, truncated on the right; several rows if its turns cannot share one. A row is unusable if
    no token with loss remains."""
    given = images.read(location, record.images)
    try:
        if record.segments:
            encoded = [encode_segments([(record.context, False), *record.segments], tokenizer)]
        elif record.text is not None:
            encoded = [encode_text(record.text, tokenizer, context=record.context)]
        else:
            # A source row makes at least one row: rows are split between the steps by their index in the source.
            turns = record.messages
            encoded = (
                encode_conversation(turns, tokenizer, tools=record.tools, continued=record.continued, images=given)
                if turns
                else []
            )
            encoded = encoded or [EncodedSequence([], [])]
    except UserError as error:
        raise UserError(f"{location}: {error}") from error
    return [
        {
            "input_ids": row.input_ids[:limit],
            "loss_mask": row.loss_mask[:limit],
            "is_text": record.text is not None,
            "length": min(len(row.input_ids), limit),
            "full_length": len(row.input_ids),
            "cut": len(row.input_ids) > limit,
            # The first token has no predecessor and cannot carry loss.
            "usable": any(row.loss_mask[1:limit]) and is_whole(row.input_ids, row.input_ids[:limit], given),
            # The column describes the whole conversation, so only its first row has a value.
            "ignored": json.dumps(
                unrendered(record.messages, tokenizer, record.tools, continued=record.continued) if number == 0 else []
            ),
            **stored_columns(given, row.images),
        }
        for number, row in enumerate(encoded)
    ]


def encode_sft_row(
    location: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int, *, images: ImageRules = NO_IMAGES
) -> EncodedRows:
    """Encode a row for SFT; see `encode_conversation_row`."""
    record = read_sft_row(location, row, refusal=images.refusal)
    return encode_conversation_row(location, record, tokenizer, limit, images)


def encode_preference_row(
    location: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int, *, images: ImageRules = NO_IMAGES
) -> EncodedRows:
    """Encode completions of one prompt and the preferences between them."""
    record = read_preference_row(location, row, refusal=images.refusal)
    columns = _encode_completions(location, record, tokenizer, limit, images)
    sequences = columns["responses"]
    if order := columns.get("image_order"):
        sequences = list(zip(sequences, order, strict=True))
    # Completions that differ only in truncated tokens carry no preference.
    usable = all(sequences[chosen] != sequences[rejected] for chosen, rejected in record.pairs)
    pairs = {"pairs": [list(pair) for pair in record.pairs], "margins": record.margins}
    return [columns | pairs | {"usable": usable and columns["usable"]}]


def encode_labelled_row(
    location: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int, *, images: ImageRules = NO_IMAGES
) -> EncodedRows:
    """Encode completions of one prompt, each labelled as desirable or not."""
    record = read_labelled_row(location, row, refusal=images.refusal)
    columns = _encode_completions(location, record, tokenizer, limit, images)
    return [columns | {"labels": record.labels}]


def _encode_completions(
    location: str,
    record: PreferenceRow | LabelledRow,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    images: ImageRules,
) -> dict[str, Any]:
    """Truncate the shared prompt after its head (BOS and the system turn), so that completions stay complete; truncate
    a completion that exceeds the limit by itself on the right. Without completions, as in a tie, a row is unusable.

    With images, `image_order` has the indices of those of each completion's sequence, in their order, and
    `prompt_images` the number of the prompt's, which are its first.
    """
    prompt, tools = record.prompt, record.tools
    given = images.read(location, [*chain.from_iterable(record.images)])
    if not record.completions:
        empty = {"responses": [], "masks": [], "length": 0, "full_length": 0, "tokens": 0, "padded_tokens": 0}
        empty |= {"cut": False, "usable": False, "ignored": "[]"}
        return empty | stored_columns(given, order=[])
    asked, *ends = accumulate(map(len, record.images))
    order = [[*range(asked), *range(*edges)] for edges in pairwise([asked, *ends])]
    shown = [given and given.some(indices) for indices in order]
    try:
        rows = [
            completion_rows(prompt, completion, tokenizer, tools=tools, images=of_completion)
            for completion, of_completion in zip(record.completions, shown, strict=True)
        ]
        encoded = [of_completion[-1] for of_completion in rows]
        ignored = [
            unrendered(
                [*prompt, *completion],
                tokenizer,
                tools,
                learn_from=len(prompt),
                continued=continued_turn(prompt, completion),
            )
            for completion in record.completions
        ]
        full_length = max(len(sequence.input_ids) for sequence in encoded)
        cut = full_length > limit
        head = head_tokens(prompt, tokenizer, tools=tools) if cut else 0
    except UserError as error:
        raise UserError(f"{location}: {error}") from error
    sequences = [sequence.input_ids for sequence in encoded]
    masks = [sequence.loss_mask for sequence in encoded]
    if cut:
        starts = [mask.index(True) if any(mask) else len(mask) for mask in masks]
        shared = min(len(os.path.commonprefix(sequences)), *starts)
        head = min(head, shared)
        surplus = min(shared - head, full_length - limit)
        sequences = [(ids[:head] + ids[head + surplus :])[:limit] for ids in sequences]
        masks = [(mask[:head] + mask[head + surplus :])[:limit] for mask in masks]
    length = max(len(ids) for ids in sequences)
    return {
        "responses": sequences,
        "masks": masks,
        "length": length,
        "full_length": full_length,
        "tokens": sum(len(ids) for ids in sequences),
        "padded_tokens": len(sequences) * length,
        "cut": cut,
        "usable": all(any(mask[1:]) for mask in masks)
        and all(is_whole(sequence.input_ids, ids, given) for sequence, ids in zip(encoded, sequences, strict=True)),
        "ignored": json.dumps(
            [*chain.from_iterable(ignored), *(EARLIER_TURNS for of_completion in rows if len(of_completion) > 1)]
        ),
        **stored_columns(given, order=order, of_prompt=asked),
    }


def encode_prompt_row(
    location: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int, *, images: ImageRules = NO_IMAGES
) -> EncodedRows:
    """Encode a prompt, truncated between its head (BOS and the system turn) and its end, which has the user's request.
    It is unusable if the head alone reaches the limit."""
    record = read_prompt_row(location, row, refusal=images.refusal)
    given = images.read(location, record.images)
    try:
        ids = encode_prompt(record.messages, tokenizer, tools=record.tools, images=given)
        head = head_tokens(record.messages, tokenizer, tools=record.tools) if len(ids) > limit else 0
    except UserError as error:
        raise UserError(f"{location}: {error}") from error
    kept = ids[:head] + ids[max(head, head + len(ids) - limit) :]
    return [
        {
            "input_ids": kept,
            "prompt": json.dumps(record.messages, ensure_ascii=False),
            "columns": json.dumps(record.columns, ensure_ascii=False, default=json_value),
            "length": min(len(ids), limit),
            "full_length": len(ids),
            "cut": len(ids) > limit,
            "usable": head < limit and is_whole(ids, kept, given),
            "ignored": json.dumps(
                unrendered(record.messages, tokenizer, record.tools, learn_from=len(record.messages))
            ),
            **stored_columns(given),
        }
    ]


def require_rendered(location: str, row: Row, ignored: str) -> None:
    """Refuse a row with a message key that the chat template does not render, but which may contain text.

    Args:
        location: location of the row.
        row: row as read from its source.
        ignored: column `ignored` of its encoding.

    Raises:
        UserError: with the names of the column and the key.
    """
    lost = next(filter(refused, json.loads(ignored)), None)
    if lost is not None:
        key = "content" if lost.startswith("<think>") else lost.partition(" (")[0]
        columns = [name for name in row if name in _MESSAGE_COLUMNS]
        column = next((name for name in columns if _has_key(row[name], key)), " or ".join(columns))
        raise UserError(
            f"{location}: column {column!r}: the chat template does not render the key {lost!r} of a message: remove "
            "it, or set data.chat_template to a template that renders it"
        )


def _has_key(value: Any, key: str) -> bool:
    """Return True if a column has a message with a key."""
    if isinstance(value, list):
        return any(_has_key(item, key) for item in value)
    return isinstance(value, dict) and has_value(value, key)


def earlier_turns_text(ignored: Counter[str]) -> str:
    """The number of completions with turns that carry no loss, which it takes out; empty if there are none."""
    count = ignored.pop(EARLIER_TURNS, 0)
    if not count:
        return ""
    return (
        f"{count:,} completions have turns before the last that carry no loss, as the chat template renders them "
        "differently there: give those turns rows of their own, with the turns before them as the prompt"
    )
