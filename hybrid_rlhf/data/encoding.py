"""Rows of the contract to columns of tokens, cut to a length, one encoder a kind of row.

Each gives `length`, in tokens, `cut`, whether anything was cut away, and `usable`, whether what is left can teach.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat import Encoded, encode_answer, encode_conversation, encode_prompt, encode_text, head_tokens
from hybrid_rlhf.data.messages import Message, Tools
from hybrid_rlhf.data.rows import Conversation, labelled_row, preference_row, prompt_row
from hybrid_rlhf.data.sources import Row
from hybrid_rlhf.data.template import without_place


def encode_conversation_row(
    place: str, record: Conversation, tokenizer: PreTrainedTokenizerBase, limit: int
) -> list[dict[str, Any]]:
    """Cut on the right; of no use once no token with loss is left. Several rows where turns cannot share one."""
    try:
        if record.text is not None:
            encoded = [encode_text(record.text, tokenizer, context=record.context)]
        else:
            # A source row makes one row at least: rows are dealt to the steps by their place in the source.
            encoded = encode_conversation(record.messages, tokenizer, tools=record.tools) or [Encoded([], [])]
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    return [
        {
            "input_ids": row.input_ids[:limit],
            "loss_mask": row.loss_mask[:limit],
            "is_text": record.text is not None,
            "length": min(len(row.input_ids), limit),
            "cut": len(row.input_ids) > limit,
            # The first token has no predecessor and cannot carry loss.
            "usable": any(row.loss_mask[1:limit]),
            # Of the conversation as a whole, so once.
            "ignored": _ignored(record.messages, tokenizer, record.tools) if number == 0 else "",
        }
        for number, row in enumerate(encoded)
    ]


def encode_preference_row(place: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int) -> list[dict[str, Any]]:
    """Answers to one prompt and which is better than which."""
    record = preference_row(place, row)
    columns = _answers(place, record.prompt, record.responses, tokenizer, limit, record.tools)
    answers = columns["responses"]
    # Answers that differ only in what was cut away can teach nothing.
    usable = all(answers[better] != answers[worse] for better, worse in record.pairs)
    taught = {"pairs": [list(pair) for pair in record.pairs], "margins": record.margins}
    return [columns | taught | {"usable": usable and columns["usable"]}]


def encode_labelled_row(place: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int) -> list[dict[str, Any]]:
    """Answers to one prompt, each good or bad."""
    record = labelled_row(place, row)
    columns = _answers(place, record.prompt, record.responses, tokenizer, limit, record.tools)
    return [columns | {"labels": record.labels}]


def _answers(
    place: str,
    prompt: list[Message],
    responses: list[list[Message]],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    tools: Tools | None,
) -> dict[str, Any]:
    """Cut what the answers share, behind BOS and the system's turn, so that they stay whole; one that alone is too
    long, on its right."""
    try:
        encoded = [encode_answer(prompt, answer, tokenizer, tools=tools) for answer in responses]
        head = head_tokens(prompt, tokenizer, tools=tools)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    answers = [answer.input_ids for answer in encoded]
    masks = [answer.loss_mask for answer in encoded]
    shared = min(_shared(answers), *(mask.index(True) if any(mask) else len(mask) for mask in masks))
    cut = any(len(ids) > limit for ids in answers)
    if cut:
        head = min(head, shared)
        surplus = min(shared - head, max(len(ids) for ids in answers) - limit)
        answers = [(ids[:head] + ids[head + surplus :])[:limit] for ids in answers]
        masks = [(mask[:head] + mask[head + surplus :])[:limit] for mask in masks]
    return {
        "responses": answers,
        "masks": masks,
        "length": max(len(ids) for ids in answers),
        "tokens": sum(len(ids) for ids in answers),
        "cut": cut,
        "usable": all(any(mask[1:]) for mask in masks),
        "ignored": _ignored([*prompt, *(message for answer in responses for message in answer)], tokenizer, tools),
    }


def encode_prompt_row(place: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int) -> list[dict[str, Any]]:
    """Cut between the head (BOS, the system's turn) and the end of a prompt, which is what is asked; of no use where
    the head alone is as long as the limit."""
    record = prompt_row(place, row)
    try:
        ids = encode_prompt(record.messages, tokenizer, tools=record.tools)
        head = head_tokens(record.messages, tokenizer, tools=record.tools) if len(ids) > limit else 0
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    return [
        {
            "input_ids": ids[:head] + ids[max(head, head + len(ids) - limit) :],
            "prompt": json.dumps(record.messages, ensure_ascii=False),
            "columns": json.dumps(record.columns, ensure_ascii=False, default=str),
            "length": min(len(ids), limit),
            "cut": len(ids) > limit,
            "usable": head < limit,
            "ignored": _ignored(record.messages, tokenizer, record.tools),
        }
    ]


def _ignored(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, tools: Tools | None) -> str:
    """What the chat template has no place for, an entry a message, parted by commas: a column of one type."""
    return ",".join(without_place(messages, tokenizer, tools))


def _shared(answers: list[list[int]]) -> int:
    """Tokens that all answers begin with."""
    shared = 0
    while all(shared < len(ids) and ids[shared] == answers[0][shared] for ids in answers):
        shared += 1
    return shared
