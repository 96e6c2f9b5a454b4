"""What to sample, and what comes back.

The random numbers of a request come from a stream of its own, keyed by its seed, so that a completion does not depend
on what else is in the batch, nor on the device, nor on how many ranks share the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from hybrid_rlhf.configs.errors import UserError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions of a prompt are sampled."""

    max_new_tokens: int = 128
    """Longest completion, its stop token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy, with the log-probs of the model's own distribution (vLLM's rule)."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this probability; 1 draws from all."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 draws from all."""
    min_p: float = 0.0
    """Draw from tokens with at least this share of the likeliest one's probability; 0 draws from all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or completion holds are divided by it where positive, else multiplied."""
    n: int = 1
    """Completions of each prompt."""
    min_new_tokens: int = 0
    """No stop token is drawn before this many."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the engine's own."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion with the token that completes them; the engine needs a tokenizer."""
    seed: int | None = None
    """Key of the random stream; none: torch's global generator gives one."""
    greedy: bool = False
    """Take the likeliest token always."""

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens must be 1 or more": self.max_new_tokens >= 1,
            "n must be 1 or more": self.n >= 1,
            "temperature must be 0 (greedy) or more": self.temperature >= 0,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be 0 (all) or more": self.top_k >= 0,
            "min_p must be in [0, 1)": 0 <= self.min_p < 1,
            "repetition_penalty must be above 0 (1 is none)": self.repetition_penalty > 0,
            "min_new_tokens must be 0 or more": self.min_new_tokens >= 0,
            "stop_strings must hold no empty text": all(self.stop_strings),
        }
        for rule, holds in rules.items():
            if not holds:
                raise UserError(f"{rule}, got {getattr(self, rule.split()[0])}: change it")

    @property
    def takes_likeliest(self) -> bool:
        """Whether it is greedy."""
        return self.greedy or self.temperature == 0

    @property
    def divisor(self) -> float:
        """What logits are divided by, for what is drawn and for its log-probs."""
        return self.temperature or 1.0

    @property
    def draws_from_all(self) -> bool:
        """Whether tokens are drawn from the whole distribution at the temperature, nothing cut or penalised."""
        cut = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return not cut and self.repetition_penalty == 1 and self.min_new_tokens == 0


@dataclass(frozen=True)
class Completion:
    """One answer."""

    token_ids: list[int]
    """The stop token included."""
    logprobs: list[float]
    """Under the whole distribution at the sampling temperature, as training computes them."""
    finish_reason: FinishReason
    sampling_logprobs: list[float] = field(default_factory=list)
    """Under the distribution that was drawn from: cut by top_p, top_k and min_p, penalised, renormalised. Equal to
    `logprobs` where nothing is cut."""
    weight_version: int = 0
    """Of the weights that sampled it; a training engine counts its updates."""


def per_request(sampling: SamplingParams | Sequence[SamplingParams], requests: int) -> list[SamplingParams]:
    """One SamplingParams a prompt, each with a seed of its own.

    A single one with seed s gives prompt i the stream (s, i); a sequence is taken as it is.
    """
    if isinstance(sampling, SamplingParams):
        seed = sampling.seed if sampling.seed is not None else int(torch.randint(2**62, ()).item())
        return [replace(sampling, seed=derive_seed(seed, index)) for index in range(requests)]
    if len(sampling) != requests:
        raise ValueError(f"one SamplingParams a prompt, got {len(sampling)} for {requests} prompts")
    return [p if p.seed is not None else replace(p, seed=int(torch.randint(2**62, ()).item())) for p in sampling]


def derive_seed(*keys: int) -> int:
    """A seed that depends on all keys and shares no stream with those of other keys."""
    return int(np.random.SeedSequence([key % 2**64 for key in keys]).generate_state(1, np.uint64)[0] >> 1)


def uniform_stream(seed: int, sample: int, count: int) -> np.ndarray:
    """The uniforms [count] float64 in [0, 1) of one sample of a request."""
    return np.random.default_rng([seed, sample]).random(count)
