"""How much a token weighs in the actor's loss.

All weights are relative to a mean over the tokens of a mini-batch, so that a loss is divided once, by their number,
whatever the weights.

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
    normalisation: Literal["token", "sequence", "fixed"],
    tokens: float,
    sequences: float,
    max_tokens: int,
    kept: Tensor | None = None,
    kept_tokens: float | None = None,
) -> Tensor:
    """Weights [B, 1] float32 that turn the mean over tokens into another.

    Source: token, DAPO (arXiv 2503.14476, eq. 10); sequence, GRPO (arXiv 2402.03300, eq. 3); fixed, Dr. GRPO
    (arXiv 2503.20783, section 3.2).

    Args:
        mask: [B, T], 1 on response tokens.
        normalisation: token, each token alike; sequence, each sequence alike; fixed, each token alike, the sum divided
            by max_tokens a sequence.
        tokens: response tokens of the mini-batch, over all ranks.
        sequences: of the mini-batch, over all ranks.
        max_tokens: longest response that was allowed.
        kept: [B, T], 1 on the response tokens that the means are over; none: all of them.
        kept_tokens: of the mini-batch, over all ranks; given with kept.
    """
    lengths = (mask.bool() if kept is None else kept.bool() & mask.bool()).sum(dim=1, keepdim=True).float()
    if normalisation == "token":
        return torch.full_like(lengths, 1.0 if kept_tokens is None else tokens / max(kept_tokens, 1.0))
    divisor = lengths.clamp(min=1) if normalisation == "sequence" else torch.full_like(lengths, max_tokens)
    return tokens / (sequences * divisor)


def correction_weights(
    old_logprobs: Tensor, *, sampler_logprobs: Tensor, mask: Tensor, how: Literal["truncate", "mask"], clip: float,
    low: float | None = None,
) -> Tensor:  # fmt: skip
    """Importance weights [B, T] of tokens that another distribution drew; without gradient.

    Source: truncated importance sampling, fengyao.notion.site/off-policy-rl (2025); masked, IcePop of the same year.

    Args:
        old_logprobs: [B, T], by the training forward when sampled.
        sampler_logprobs: [B, T], of what was drawn from.
        mask: [B, T], 1 on response tokens.
        how: truncate, at most clip; mask, 0 outside [low, clip].
        clip: 1 or more.
        low: of mask, in (0, 1]; none: 1 / clip.
    """
    ratio = (keep(old_logprobs.detach(), mask) - keep(sampler_logprobs, mask)).exp()
    if how == "truncate":
        return ratio.clamp(max=clip)
    return torch.where((ratio >= (1 / clip if low is None else low)) & (ratio <= clip), ratio, 0.0)
