"""Rows of the contract to columns of tokens, cut to a length, one encoder a kind of row.

Each gives `length`, in tokens, `cut`, whether anything was cut away, and `usable`, whether what is left can teach.
"""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat import encode_conversation, encode_prompt, encode_text
from hybrid_rlhf.data.rows import Conversation, Message, labelled_row, preference_row, prompt_row
from hybrid_rlhf.data.sources import Row


def encode_conversation_row(
    place: str, record: Conversation, tokenizer: PreTrainedTokenizerBase, limit: int
) -> dict[str, Any]:
    """Cut on the right; of no use once no token with loss is left."""
    try:
        if record.text is not None:
            encoded = encode_text(record.text, tokenizer, context=record.context)
        else:
            encoded = encode_conversation(record.messages, tokenizer)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    ids, mask = encoded.input_ids[:limit], encoded.loss_mask[:limit]
    # The first token has no predecessor and cannot carry loss.
    cut = len(encoded.input_ids) > limit
    return {
        "input_ids": ids,
        "loss_mask": mask,
        "is_text": record.text is not None,
        "length": len(ids),
        "cut": cut,
        "usable": any(mask[1:]),
    }


def encode_preference_row(place: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int) -> dict[str, Any]:
    """Answers to one prompt and which is better than which."""
    record = preference_row(place, row)
    columns = _answers(place, record.prompt, record.responses, tokenizer, limit)
    answers = columns["responses"]
    # Answers that differ only in what was cut away can teach nothing.
    usable = all(answers[better] != answers[worse] for better, worse in record.pairs)
    return columns | {
        "pairs": [list(pair) for pair in record.pairs],
        "margins": record.margins,
        "usable": usable and columns["usable"],
    }


def encode_labelled_row(place: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int) -> dict[str, Any]:
    """Answers to one prompt, each good or bad."""
    record = labelled_row(place, row)
    return _answers(place, record.prompt, record.responses, tokenizer, limit) | {"labels": record.labels}


def _answers(
    place: str,
    prompt: list[Message],
    responses: list[list[Message]],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
) -> dict[str, Any]:
    """Cut what the answers share on its left, so that they stay whole; one that alone is too long, on its right."""
    try:
        encoded = [encode_conversation(prompt + answer, tokenizer, learn_from=len(prompt)) for answer in responses]
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    answers = [answer.input_ids for answer in encoded]
    masks = [answer.loss_mask for answer in encoded]
    shared = min(_shared(answers), *(mask.index(True) if any(mask) else len(mask) for mask in masks))
    cut = any(len(ids) > limit for ids in answers)
    if cut:
        longest_answer = max(len(ids) - shared for ids in answers)
        surplus = max(0, shared - max(0, limit - longest_answer))
        answers = [ids[surplus:][:limit] for ids in answers]
        masks = [mask[surplus:][:limit] for mask in masks]
    return {
        "responses": answers,
        "masks": masks,
        "length": max(len(ids) for ids in answers),
        "tokens": sum(len(ids) for ids in answers),
        "cut": cut,
        "usable": all(any(mask[1:]) for mask in masks),
    }


def encode_prompt_row(place: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int) -> dict[str, Any]:
    """Cut on the left: the end of a prompt is what is asked."""
    record = prompt_row(place, row)
    try:
        ids = encode_prompt(record.messages, tokenizer)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    return {
        "input_ids": ids[-limit:],
        "prompt": json.dumps(record.messages, ensure_ascii=False),
        "columns": json.dumps(record.columns, ensure_ascii=False, default=str),
        "length": min(len(ids), limit),
        "cut": len(ids) > limit,
        "usable": True,
    }


def _shared(answers: list[list[int]]) -> int:
    """Tokens that all answers begin with."""
    shared = 0
    while all(shared < len(ids) and ids[shared] == answers[0][shared] for ids in answers):
        shared += 1
    return shared
