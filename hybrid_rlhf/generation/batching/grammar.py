"""Grammars of completions: which tokens may come next, as bits of the vocabulary, by llguidance.

A grammar is a JSON schema, or Lark with llguidance's extensions. It is compiled once per tokenizer, and each request
has its own state. The bits of all rows are computed on other threads while the model runs, and are needed when the step
samples (workspace.py). A completion ends with a stop token, which the grammar allows where its text is complete.

Source: github.com/guidance-ai/llguidance (MIT), an optional package (the extra `serve`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.transfers import to_device

WORD_TOKENS = 32
"""Number of tokens whose bits are in one word."""
_SPACE = r"[ \n]{0,20}"
"""White space between the parts of JSON. It is bounded, as some models would write it for ever."""
_CACHED = 256


class Grammar:
    """The state of one completion."""

    def __init__(self, matcher: Any) -> None:
        """Take a matcher of llguidance at the beginning of the text."""
        self.matcher = matcher

    def append(self, token: int) -> None:
        """Take the next token.

        Raises:
            RuntimeError: if the grammar does not allow it, or reaches a limit of llguidance.
        """
        if not self.matcher.consume_token(token):
            raise RuntimeError(f"a grammar must allow the sampled token {token}: {self.matcher.get_error():.300}")

    def restart(self, tokens: Sequence[int]) -> None:
        """Go back to the beginning, and take tokens."""
        self.matcher.reset()
        for token in tokens:
            self.append(token)


def source_of(response_format: Mapping[str, Any]) -> str:
    """The grammar of a response format, in Lark.

    Raises:
        UserError: for an unknown type, or a schema that is missing.
    """
    kind = response_format.get("type")
    if kind == "json_object":
        return f"start: {json_rule({'type': 'object'})}"
    if kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if not isinstance(schema, Mapping):
            raise UserError(
                f"response_format of type json_schema needs json_schema.schema, got {described!r:.80}: give it as "
                '{"json_schema": {"name": ..., "schema": {...}}}'
            )
        return f"start: {json_rule(schema)}"
    if kind == "lark" and isinstance(response_format.get("lark"), str):
        return str(response_format["lark"])
    raise UserError(
        "response_format must be of type text, json_object, json_schema or lark (with its text in lark), got "
        f"{kind!r:.80}: change it"
    )


def json_rule(schema: Mapping[str, Any]) -> str:
    """The part of a Lark grammar that matches JSON of a schema."""
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': _SPACE}, **schema})}"


def require_grammars() -> None:
    """Raise UserError unless llguidance is installed."""
    if find_spec("llguidance") is None:
        raise UserError("response_format needs llguidance, it is not installed: pip install 'hybrid_rlhf[serve]'")


def grammar_of(source: str, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, stop: frozenset[int]) -> Grammar:
    """A new state of a grammar, which is compiled in the first call.

    Args:
        source: the grammar, in Lark.
        tokenizer: tokenizer of the model.
        vocab_size: size of the model's vocabulary, which may be larger.
        stop: the tokens that end a completion.

    Raises:
        UserError: for a grammar that does not compile, a tokenizer that llguidance does not read, or no stop token.
    """
    return Grammar(_compiled(source, tokenizer, vocab_size, stop).deep_copy())


@functools.lru_cache(maxsize=_CACHED)
def _compiled(source: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop: frozenset[int]) -> Any:
    from llguidance import LLMatcher

    matcher = LLMatcher(_tokens(tokenizer, vocab_size, stop), source, log_level=0)
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split())
        raise UserError(f"response_format must be a grammar that compiles, got an error ({reason:.300}): change it")
    return matcher


@functools.lru_cache(maxsize=8)
def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop: frozenset[int]) -> Any:
    """The vocabulary in llguidance's form; it takes a second for a large one."""
    require_grammars()
    from llguidance import hf

    if not stop:
        raise UserError("response_format needs a stop token, the engine has none: give stop_token_ids")
    if not tokenizer.is_fast or len(tokenizer) > vocab_size:
        raise UserError(
            "response_format needs a fast tokenizer whose tokens the model has, got "
            f"{type(tokenizer).__name__} with {len(tokenizer)} tokens for {vocab_size}: use another model"
        )
    return hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(stop))  # type: ignore[arg-type]


class TokenMasks:
    """Bits of the allowed tokens of rows."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate bits for a number of rows on the host; `device` reads them."""
        from llguidance import LLExecutor

        words = -(-vocab_size // WORD_TOKENS)
        self._bits = torch.zeros(rows, words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._array: np.ndarray = self._bits.numpy()
        self._executor = LLExecutor()
        self._thread = ThreadPoolExecutor(1, "token-masks")

    def begin(self, grammars: Sequence[tuple[int, Grammar]]) -> PendingMasks:
        """Begin to compute the bits of rows, given by their places and grammars."""
        matchers = [(grammar.matcher, number) for number, (_, grammar) in enumerate(grammars)]
        return PendingMasks(self._thread.submit(self._fill, matchers), [place for place, _ in grammars], self._bits)

    def _fill(self, matchers: Sequence[tuple[Any, int]]) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        if matchers:  # none: all rows have ended
            fill_next_token_bitmask_par(self._executor, list(matchers), self._array)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)


class PendingMasks:
    """Bits that are being computed."""

    def __init__(self, done: Future[None], places: list[int], bits: Tensor) -> None:
        self._done = done
        self._places = places
        self._bits = bits

    def write(self, allowed: Tensor) -> None:
        """Wait, and write the bits to the table [S, words] of all rows."""
        self._done.result()
        places = to_device(self._places, allowed.device, torch.long)
        # The bits are not written again before this step's tokens have arrived.
        allowed[places] = to_device(self._bits[: len(self._places)], allowed.device)
