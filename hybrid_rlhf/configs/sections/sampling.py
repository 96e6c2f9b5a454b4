"""Sampling parameters of the generation engine, rollouts, distillation, chat and generate, with the names of vLLM and
OpenAI.
"""

from __future__ import annotations

import math
from typing import Any

from hybrid_rlhf.configs.sections.rules import Settings, require, setting

_LEAST_TEMPERATURE = 1e-5
"""Dividing logits by less can overflow float32."""
_ADDED_PENALTIES = ("presence_penalty", "frequency_penalty")


class SamplingParams(Settings):
    """How completions of a prompt are sampled."""

    n: int = 1
    """Completions per prompt."""
    max_new_tokens: int = 128
    """Longest completion, in tokens, including the stop token."""
    temperature: float = 1.0
    """Logits are divided by this; 0: greedy, with log-probs of the model's own distribution (as in vLLM); else at least
    1e-5."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this probability (nucleus sampling); 1: from all."""
    top_k: int = setting(0, advanced=True)
    """Sample from this number of most likely tokens; 0: from all."""
    min_p: float = setting(0.0, advanced=True)
    """Sample from tokens with at least this fraction of the most likely token's probability; 0: from all."""
    repetition_penalty: float = setting(1.0, advanced=True)
    """Logits of tokens in the prompt or completion are divided by this if positive, else multiplied; 1: no penalty."""
    presence_penalty: float = setting(0.0, advanced=True)
    """Subtracted from the logits of tokens in the completion; 0: no penalty."""
    frequency_penalty: float = setting(0.0, advanced=True)
    """Subtracted from the logits of tokens once for each time that they are in the completion; 0: no penalty."""
    logit_bias: dict[int, float] = setting(default_factory=dict, advanced=True)
    """Added to the logits of tokens, by token id."""
    min_new_tokens: int = setting(0, advanced=True)
    """Shortest completion, in tokens; no stop token is sampled before this length."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion (including the token that completes them); the engine needs a tokenizer for
    this."""
    stop_token_ids: tuple[int, ...] = setting((), advanced=True)
    """Token ids that end a completion, in addition to the model's own."""
    ignore_eos: bool = setting(False, advanced=True)
    """Continue after the model's own stop tokens; only stop_token_ids and stop end a completion early."""
    response_format: dict[str, Any] | None = setting(None, advanced=True)
    """Format of a completion, as in OpenAI's API: {type: json_object}, or {type: json_schema, json_schema: {schema:
    ...}}; also {type: lark, lark: ...}, a grammar of llguidance. Null: any text."""
    seed: int | None = None
    """Seed of the sampling; null: a new one for each call."""

    def _check(self) -> None:
        rules = {
            "n must be 1 or more": self.n >= 1,
            "max_new_tokens must be 1 or more": self.max_new_tokens >= 1,
            f"temperature must be 0 (greedy) or a finite number of at least {_LEAST_TEMPERATURE:g}": (
                self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature < math.inf
            ),
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be 0 (all) or more": self.top_k >= 0,
            "min_p must be in [0, 1)": 0 <= self.min_p < 1,
            "repetition_penalty must be above 0 (1 is none)": self.repetition_penalty > 0,
            **{f"{name} must be in [-2, 2] (0 is none)": -2 <= getattr(self, name) <= 2 for name in _ADDED_PENALTIES},
            "logit_bias must have values in [-100, 100]": all(-100 <= bias <= 100 for bias in self.logit_bias.values()),
            "min_new_tokens must be 0 or more": self.min_new_tokens >= 0,
            "stop must contain no empty string": all(self.stop),
            "seed must be 0 or more": self.seed is None or self.seed >= 0,
        }
        for rule, holds in rules.items():
            require(holds, f"{rule}, got {getattr(self, rule.split()[0])}: change it")
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


def require_default(sampling: SamplingParams, keys: tuple[str, ...], *, section: str) -> None:
    """Raise UserError if a key that a section does not read differs from its default."""
    plain = SamplingParams()
    for name in vars(plain):
        value = getattr(sampling, name)
        require(
            name in keys or value == getattr(plain, name),
            f"{section} reads {', '.join(keys)} only, got {name} {value}: leave it out",
        )
