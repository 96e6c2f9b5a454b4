"""Requests from prompts, after checks of prompts and sampling parameters against the model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.stop_strings import stop_strings
from hybrid_rlhf.generation.sampling import SamplingParams, per_request, uniform_stream
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME

logger = logging.getLogger(LOGGER_NAME)
_MOST_TOP_K = 2**31 - 1
_CHANGES_WITH_LENGTH = " (original_max_position_embeddings; in longer sequences its rotary positions all change)"


@dataclass
class RequestMaker:
    """Makes the requests of an engine."""

    max_positions: int | None
    """Longest sequence that the model has positions for; none: no limit."""
    trained_positions: int | None
    """Longest sequence that the model was trained for, if it computes positions; none: unknown."""
    vocab_size: int
    stop_token_ids: frozenset[int]
    """Tokens that end every completion."""
    tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer for stop strings; none: stop strings are refused."""
    adapters: tuple[str, ...]
    """Names of the adapters that a prompt may choose."""

    def adapter_number(self, name: str | None) -> int:
        """Return the number of an adapter, from 1 on; 0: the model itself.

        Raises:
            UserError: if there is no adapter of this name.
        """
        if name is not None and name not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise UserError(f"an adapter must be one of the engine's, {known}, got {name}: name one of them")
        return 0 if name is None else 1 + self.adapters.index(name)

    def requests(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        """Return one request per sample of each prompt; arguments as in `GenerationEngine.generate`."""
        params_of_prompts = per_request(sampling, len(prompts))
        for index, (prompt, params) in enumerate(zip(prompts, params_of_prompts, strict=True)):
            self._check_tokens(index, prompt, params)
        if any(params.stop for params in params_of_prompts) and self.tokenizer is None:
            raise UserError("stop needs a tokenizer, the engine has none: use stop_token_ids")
        return [
            Request(
                list(prompt),
                index,
                params,
                self.stop_token_ids | set(params.stop_token_ids),
                uniform_stream(params.seed or 0, sample, self._longest_completion(index, prompt, params)),
                stop_strings(self.tokenizer, params.stop) if params.stop and self.tokenizer is not None else None,
            )
            for index, (prompt, params) in enumerate(zip(prompts, params_of_prompts, strict=True))
            for sample in range(params.n)
        ]

    def _check_tokens(self, index: int, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise UserError if a prompt is empty, a token of it or a stop token is not in the vocabulary, or top_k does
        not fit in int32.
        """
        if not len(prompt):
            raise UserError(f"a prompt has at least one token, prompt {index} has none: drop it")
        most = self.vocab_size - 1
        for name, tokens in ((f"prompt {index}", prompt), ("stop_token_ids", params.stop_token_ids)):
            if len(tokens) and (min(tokens) < 0 or max(tokens) > most):
                unknown = next(token for token in tokens if not 0 <= token <= most)
                raise UserError(f"token ids must be in 0..{most}, {name} has {unknown}: remove it")
        if params.top_k > _MOST_TOP_K:
            raise UserError(f"top_k must be at most {_MOST_TOP_K}, got {params.top_k}: lower it")

    def _longest_completion(self, index: int, prompt: Sequence[int], params: SamplingParams) -> int:
        """Maximum number of tokens of a completion: max_new_tokens, or the positions that the prompt leaves."""
        limit = self.max_positions
        trained = self.trained_positions
        if limit is None:
            if trained is not None and len(prompt) + params.max_new_tokens > trained:
                _warn_of_untrained_positions(trained)
            return params.max_new_tokens
        if len(prompt) >= limit:
            why = "" if trained is None or trained <= limit else _CHANGES_WITH_LENGTH
            raise UserError(
                f"the model has {limit} positions{why}, prompt {index} has {len(prompt)} tokens: shorten the prompt"
            )
        return min(params.max_new_tokens, limit - len(prompt))


@functools.cache
def _warn_of_untrained_positions(trained: int) -> None:
    """Log a warning, once for each context length, because rollouts create many engines."""
    logger.warning(
        "prompt and max_new_tokens exceed the model's context length of %d tokens (max_position_embeddings): what is "
        "sampled beyond it may be worse",
        trained,
    )
