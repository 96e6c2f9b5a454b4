"""The type of converted rows, and the text that is learned of an encoded row."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.data.chat.conversation import EncodedSequence
from hybrid_rlhf.data.preparation.conversion.converting import ConversionReport
from hybrid_rlhf.data.rows.files import Row

Converted = Callable[..., tuple[list[Row], ConversionReport]]
"""Converts rows or a file of rows; see the fixture `converted`."""


def learned(row: EncodedSequence, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text of the tokens with loss."""
    return tokenizer.decode([token for token, loss in zip(row.input_ids, row.loss_mask, strict=True) if loss])
