"""Tokenizers, checked: an eos token there must be, a pad token is found, a chat template may be missing.

pad may equal eos: lengths come from masks, never from token ids.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.sources import quiet_transformers


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a resolved model, with eos and pad set and special tokens never split.

    Raises:
        UserError: when there is no tokenizer, or one without an eos token.
    """
    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} has no tokenizer that transformers can load ({first_line(error)}): save one beside the model"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"a tokenizer needs an eos token, {path} has none: set tokenizer.eos_token and save it beside the model"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer  # type: ignore[no-any-return]


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_eos: int | list[int] | None) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's eos and those of the model's generation config."""
    ids = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *ids]))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for one-line messages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
