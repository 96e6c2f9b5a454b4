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

from hybrid_rlhf.configs.sections.sampling import SamplingParams

MOST_TOP_LOGPROBS = 20
"""Most likely tokens that can be reported with a token (OpenAI's limit)."""
FinishReason = Literal["stop", "length", "cancelled"]
"""cancelled: in an open batch only (open_batch.py)."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: list[int]
    """The stop token included."""
    logprobs: list[float]
    """Per token, under the full distribution at the sampling temperature, as training computes them."""
    finish_reason: FinishReason | None
    """None: it is not finished, and `GenerationEngine.generate` may continue it."""
    sampling_logprobs: list[float] = field(default_factory=list)
    """Per token, under the distribution that was sampled from: penalised, truncated by top_k, top_p and min_p, and
    renormalised. Equal to `logprobs` without truncation and penalties."""
    weight_versions: list[int] = field(default_factory=list)
    """Per token, version of the weights that sampled it: optimizer updates, for a training engine."""
    routes: np.ndarray | None = field(default=None, compare=False)
    """[tokens of prompt and completion, mixtures, experts per token] int8 or int16: the experts that computed each
    token, where they are recorded; -1 for the last token, which no layer has read."""


@dataclass(frozen=True)
class FinishedShare:
    """Ends a call of the engine when enough of its prompts are finished, which a prompt is with all its samples.

    The end is a number of tokens: the smallest by which enough prompts finish if every completion grows by one token at
    a time. A completion that needs more is returned unfinished after exactly so many new tokens. Which ones these are
    depends on tokens alone, not on memory, batching or time.
    """

    prompts: int
    """How many are enough."""
    required: frozenset[int] = frozenset()
    """Indices of prompts that must be finished too."""


def per_request(sampling: SamplingParams | Sequence[SamplingParams], requests: int) -> list[SamplingParams]:
    """One SamplingParams per prompt, each with its own seed.

    A single one with seed s gives prompt i the stream (s, i); a sequence is used as it is.
    """
    if isinstance(sampling, SamplingParams):
        seed = sampling.seed if sampling.seed is not None else int(torch.randint(2**62, ()).item())
        return [replace(sampling, seed=derive_seed(seed, index)) for index in range(requests)]
    if len(sampling) != requests:
        raise ValueError(f"sampling needs one SamplingParams per prompt, got {len(sampling)} for {requests} prompts")
    return [p if p.seed is not None else replace(p, seed=int(torch.randint(2**62, ()).item())) for p in sampling]


def derive_seed(*keys: int) -> int:
    """A seed that depends on all keys; other keys give independent streams."""
    return int(np.random.SeedSequence([key % 2**64 for key in keys]).generate_state(1, np.uint64)[0] >> 1)


def uniform_stream(seed: int, sample: int, count: int) -> np.ndarray:
    """Uniform numbers [count] float64 in [0, 1) for one sample of a prompt."""
    return np.random.default_rng([seed, sample]).random(count)
