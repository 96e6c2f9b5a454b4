"""Weights of tokens in the actor's loss.

All weights are relative to the mean over the tokens of a mini-batch, so that a loss is divided once, by the number of
tokens, for any weights.

Shapes: B batch, T time.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybrid_rlhf.functional.masking import keep


def length_weights(
    mask: Tensor,
    *,
    normalization: Literal["token", "sequence", "fixed"],
    tokens: float,
    sequences: float,
    max_tokens: int,
    kept: Tensor | None = None,
    kept_tokens: float | None = None,
) -> Tensor:
    """Weights [B, 1] float32 that turn the mean over tokens into the mean of a normalisation.

    Source: token, DAPO (arXiv 2503.14476, eq. 10); sequence, GRPO (arXiv 2402.03300, eq. 3); fixed, Dr. GRPO
    (arXiv 2503.20783, section 3.2).

    Args:
        mask: [B, T], 1 on completion tokens.
        normalization: token, equal weight per token; sequence, equal weight per sequence; fixed, equal weight per token
            and the sum divided by max_tokens per sequence.
        tokens: completion tokens of the mini-batch, over all ranks.
        sequences: completions of the mini-batch, over all ranks.
        max_tokens: maximum length of a completion.
        kept: [B, T], 1 on the completion tokens that the mean is over; None: all of them.
        kept_tokens: kept tokens of the mini-batch, over all ranks; required with kept.
    """
    lengths = (mask.bool() if kept is None else kept.bool() & mask.bool()).sum(dim=1, keepdim=True).float()
    if normalization == "token":
        return torch.full_like(lengths, 1.0 if kept_tokens is None else tokens / max(kept_tokens, 1.0))
    divisor = lengths.clamp(min=1) if normalization == "sequence" else torch.full_like(lengths, max_tokens)
    return tokens / (sequences * divisor)


def correction_weights(
    old_logprobs: Tensor,
    *,
    sampler_logprobs: Tensor,
    mask: Tensor,
    how: Literal["truncate", "mask"],
    clip: float,
    low: float | None = None,
) -> Tensor:
    """Importance weights [B, T] of tokens that were sampled from another distribution; without gradient.

    Source: truncated importance sampling, fengyao.notion.site/off-policy-rl (2025); masked, IcePop of the same year.

    Args:
        old_logprobs: [B, T], log-probs of the training forward with the weights that sampled.
        sampler_logprobs: [B, T], log-probs under the distribution that was sampled from.
        mask: [B, T], 1 on completion tokens.
        how: truncate limits weights to clip; mask sets those outside [low, clip] to 0.
        clip: upper bound, 1 or more.
        low: lower bound of mask, in (0, 1]; None: 1 / clip.
    """
    ratio = (keep(old_logprobs.detach(), mask) - keep(sampler_logprobs, mask)).exp()
    if how == "truncate":
        return ratio.clamp(max=clip)
    return torch.where((ratio >= (1 / clip if low is None else low)) & (ratio <= clip), ratio, 0.0)
