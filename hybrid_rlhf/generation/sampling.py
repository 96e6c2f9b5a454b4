"""Results of sampling, and its random numbers.

Each request has a separate stream of random numbers, keyed by its seed, so a completion depends neither on the rest of
the batch nor on the device or the number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.sampling import SamplingParams

MOST_TOP_LOGPROBS = 20
"""Maximum number of most likely tokens reported with each token (OpenAI's limit)."""
FinishReason = Literal["stop", "length", "cancelled"]
"""cancelled: only in an open batch (open_batch.py)."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: list[int]
    """Token ids, including the stop token."""
    logprobs: list[float]
    """Per token, under the full distribution at the sampling temperature, as training computes them."""
    finish_reason: FinishReason | None
    """None: the completion is unfinished, and `GenerationEngine.generate` can continue it."""
    sampling_logprobs: list[float] = field(default_factory=list)
    """Per token, under the distribution that was sampled from: penalised, truncated by top_k, top_p and min_p, and
    renormalised. Equal to `logprobs` without truncation and penalties."""
    weight_versions: list[int] = field(default_factory=list)
    """Per token, version of the weights that sampled it: the number of optimizer updates, for a training engine."""
    routes: np.ndarray | None = field(default=None, compare=False)
    """[tokens of prompt and completion, mixtures, experts per token] int8 or int16: the experts that computed each
    token, if they are recorded; -1 for the last token, which no layer has read."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probs of all tokens of a prompt but the first, at temperature 1."""

    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    """For each of these tokens, the most likely tokens at its place with their log-probs, most likely first."""

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, top: int) -> PromptLogprobs:
        """Those of labels [n] under logits [n, V], with the `top` most likely tokens."""
        logprobs = logits.float().log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        chosen = logprobs.gather(1, labels[:, None])[:, 0].tolist()
        return cls(chosen, [list(zip(*pair, strict=True)) for pair in pairs])


def per_request(sampling: SamplingParams | Sequence[SamplingParams], requests: int) -> list[SamplingParams]:
    """Return one SamplingParams per prompt, each with a seed.

    From a single one with seed s, prompt i gets the stream (s, i). A sequence is used unchanged, except for missing
    seeds.
    """
    if isinstance(sampling, SamplingParams):
        seed = sampling.seed if sampling.seed is not None else int(torch.randint(2**62, ()).item())
        return [with_seed(sampling, derive_seed(seed, index)) for index in range(requests)]
    if len(sampling) != requests:
        raise ValueError(f"sampling needs one SamplingParams per prompt, got {len(sampling)} for {requests} prompts")
    return [p if p.seed is not None else with_seed(p, int(torch.randint(2**62, ()).item())) for p in sampling]


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """Return parameters with another seed. The others are not checked again, as `replace` would for each prompt of each
    rollout."""
    seeded = copy.copy(params)
    object.__setattr__(seeded, "seed", seed)
    return seeded


def derive_seed(*keys: int) -> int:
    """Return a seed that depends on all keys. Different keys give independent streams."""
    return int(np.random.SeedSequence([key % 2**64 for key in keys]).generate_state(1, np.uint64)[0] >> 1)


def uniform_stream(seed: int, sample: int, count: int) -> np.ndarray:
    """Return uniform numbers [count] float64 in [0, 1) for one sample of a prompt."""
    return np.random.default_rng([seed, sample]).random(count)
