"""What to sample, how a token is drawn, and what comes back.

A token is drawn by inverting the cumulative distribution at one uniform number. The uniforms of a request come from a
stream of its own, keyed by its seed, so that a completion does not depend on what else is in the batch, nor on the
device, nor on how many ranks share the work.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions of a prompt are sampled."""

    max_new_tokens: int = 128
    """Longest completion, its stop token included."""
    temperature: float = 1.0
    """Logits are divided by it."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this probability; 1 draws from all."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 draws from all."""
    n: int = 1
    """Completions of each prompt."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the engine's own."""
    seed: int | None = None
    """Key of the random stream; none: torch's global generator gives one."""
    greedy: bool = False
    """Take the likeliest token always."""

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens must be 1 or more": self.max_new_tokens >= 1,
            "n must be 1 or more": self.n >= 1,
            "temperature must be above 0 (greedy takes the likeliest token)": self.temperature > 0,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be 0 (all) or more": self.top_k >= 0,
        }
        for rule, holds in rules.items():
            if not holds:
                raise UserError(f"{rule}, got {getattr(self, rule.split()[0])}: change it")


@dataclass(frozen=True)
class Completion:
    """One answer: its tokens, the stop token included, and their log-probs.

    Log-probs are those of the whole distribution at the sampling temperature, as training computes them; top_p and
    top_k do not renormalise them.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


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


def uniform_stream(seed: int, sample: int, count: int) -> Tensor:
    """The uniforms [count] float64 in [0, 1) of one sample of a request."""
    return torch.from_numpy(np.random.default_rng([seed, sample]).random(count))


def draw(logits: Tensor, uniforms: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token a row.

    Args:
        logits: [B, V], any float dtype.
        uniforms: [B] in [0, 1), unused when greedy.
        sampling: temperature and truncation.

    Returns:
        tokens [B] int64 and their log-probs [B] float32 at the temperature, untruncated.
    """
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.greedy:
        tokens = logits.argmax(dim=-1)
    else:
        cumulative = _truncate(logprobs, sampling).exp().double().cumsum(dim=-1)
        threshold = uniforms.to(cumulative)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _truncate(logprobs: Tensor, sampling: SamplingParams) -> Tensor:
    """Log-probs [B, V] with the tokens outside top_k and top_p at -inf; not renormalised."""
    if 0 < sampling.top_k < logprobs.shape[-1]:
        least = logprobs.topk(sampling.top_k, dim=-1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = logprobs.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        beyond = probs.cumsum(dim=-1) - probs >= sampling.top_p  # the likeliest token always stays
        logprobs = logprobs.masked_fill(beyond.scatter(1, index, beyond), -torch.inf)
    return logprobs
