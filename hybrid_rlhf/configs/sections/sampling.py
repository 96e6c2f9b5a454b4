"""Sampling parameters of the generation engine, rollouts, distillation, chat and generate, with the names of vLLM and
OpenAI.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Interval

from hybrid_rlhf.configs.sections.rules import (
    Count,
    Natural,
    Positive,
    PositiveShare,
    Settings,
    ShareBelowOne,
    advanced,
    require,
    require_defaults,
)

_LEAST_TEMPERATURE = 1e-5
"""Dividing logits by less can overflow float32."""
_AddedPenalty = Annotated[float, Interval(ge=-2, le=2)]


class SamplingParams(Settings):
    """How completions of a prompt are sampled."""

    n: Count = 1
    """Completions per prompt."""
    max_new_tokens: Count = 128
    """Longest completion, in tokens, including the stop token."""
    temperature: float = 1.0
    """Logits are divided by this, at least 1e-5; 0, except in RL: greedy, with log-probs of the model's own
    distribution (as in vLLM)."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set of tokens with at least this probability (nucleus sampling); 1: from all."""
    top_k: Natural = advanced(0)
    """Sample from this number of most likely tokens; 0: from all."""
    min_p: ShareBelowOne = advanced(0.0)
    """Sample from tokens with at least this fraction of the most likely token's probability; 0: from all."""
    repetition_penalty: Positive = advanced(1.0)
    """Logits of tokens in the prompt or completion are divided by this if positive, else multiplied; 1: no penalty."""
    presence_penalty: _AddedPenalty = advanced(0.0)
    """Subtracted from the logits of tokens in the completion; 0: no penalty."""
    frequency_penalty: _AddedPenalty = advanced(0.0)
    """Subtracted from the logits of tokens once for each time that they are in the completion; 0: no penalty."""
    logit_bias: dict[int, Annotated[float, Interval(ge=-100, le=100)]] = advanced({})
    """Added to the logits of tokens, by token id."""
    min_new_tokens: Natural = advanced(0)
    """Shortest completion, in tokens; no stop token is sampled before this length."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion (including the token that completes them); the engine needs a tokenizer for
    this."""
    stop_token_ids: tuple[int, ...] = advanced(())
    """Token ids that end a completion, in addition to the model's own."""
    ignore_eos: bool = advanced(False)
    """Continue after the model's own stop tokens; only stop_token_ids and stop end a completion early."""
    response_format: dict[str, Any] | None = advanced(None)
    """Format of a completion, as in OpenAI's API: {type: json_object}, or {type: json_schema, json_schema: {schema:
    ...}}; also {type: lark, lark: ...}, a grammar of llguidance. Null: any text."""
    seed: Natural | None = None
    """Seed of the sampling; null: a new one for each call."""

    def _check(self) -> None:
        require(
            self.temperature == 0 or self.temperature >= _LEAST_TEMPERATURE,
            f"temperature must be 0 (greedy) or at least {_LEAST_TEMPERATURE:g}, got {self.temperature}: change it",
        )
        require(all(self.stop), f"stop must contain no empty string, got {self.stop}: change it")
        require(
            self.response_format is None or not (self.min_new_tokens or self.ignore_eos),
            "response_format decides where a completion ends, got min_new_tokens or ignore_eos too: leave them out",
        )

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always sampled."""
        return self.temperature == 0

    @property
    def divisor(self) -> float:
        """The divisor of logits, for sampling and for log-probs."""
        return self.temperature or 1.0

    @property
    def draws_from_all(self) -> bool:
        """True if tokens are sampled from the full distribution at the temperature, without truncation or penalties."""
        cut = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        changes = self.repetition_penalty != 1 or self.min_new_tokens > 0 or self.adds_to_logits
        return not (cut or changes or self.response_format is not None)

    @property
    def adds_to_logits(self) -> bool:
        """True if numbers are added to the logits of some tokens: penalties or a bias."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


def require_sampled(sampling: SamplingParams, keys: tuple[str, ...], *, section: str) -> None:
    """Raise UserError if a key that a section of training does not read differs from its default, or if the most likely
    tokens would be taken."""
    require(
        sampling.temperature > 0,
        f"{section}.temperature must be above 0, got {sampling.temperature}: give for example 1.0",
    )
    unread = [name for name in vars(sampling) if name not in keys]
    require_defaults(sampling, unread, f"{section} reads {', '.join(keys)} only")
