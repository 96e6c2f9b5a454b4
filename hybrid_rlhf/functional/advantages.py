"""Rewards per token, and advantages by GAE.

Source: GAE, Schulman et al. 2015 (arXiv 1506.02438), eq. 16; KL-shaped rewards, Ouyang et al. 2022 (arXiv 2203.02155),
eq. 2, and N details, no. 17. Deviation: the mask of a row may have gaps (turns of a user or a tool), which count as no
time steps.

Shapes: B batch, T time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.functional.masking import at_least_float32, keep, last_index, row_sums


def shaped_rewards(
    *,
    scores: Tensor,
    kl: Tensor,
    mask: Tensor,
    kl_coef: float,
    score_clip: float | None = None,
    earned: Tensor | None = None,
) -> Tensor:
    """Rewards: -kl_coef * kl on each completion token, plus the part of the score that the token earned.

    The last token earns the rest of the score. Clipping multiplies all parts of a score by clip / |score|, so that they
    keep their signs and proportions and sum to the clipped score. A score within the clip is not changed, however large
    its parts are.

    Args:
        scores: [B], scores of whole completions.
        kl: [B, T], KL per token.
        mask: [B, T], 1 on completion tokens.
        kl_coef: weight of the penalty.
        score_clip: scores are clipped to [-score_clip, score_clip]; None: not clipped.
        earned: [B, T], the part of the score that each token earned; None: the last token earns all of it.

    Returns:
        rewards [B, T] in float32 or better, 0 outside the mask. A row without completion tokens has no reward.

    Raises:
        ValueError: if scores, kl and mask do not have the same rows.
    """
    if scores.shape != kl.shape[:1]:
        raise ValueError(f"scores need one entry per row of kl: scores {tuple(scores.shape)} for kl {tuple(kl.shape)}")
    rewards = keep(-kl_coef * at_least_float32(kl), mask)
    scores = at_least_float32(scores)
    parts = torch.zeros_like(rewards) if earned is None else keep(earned, mask)
    at_end = scores - row_sums(parts)
    parts = parts.scatter_add(1, last_index(mask)[:, None], at_end.to(parts)[:, None])
    if score_clip is not None:
        parts = parts * (score_clip / scores.abs().clamp(min=score_clip))[:, None]
    return rewards + keep(parts, mask)


def gae(rewards: Tensor, *, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages, not whitened, and returns.

    Args:
        rewards: [B, T], rewards per token.
        values: [B, T], V of the state in which token t is chosen.
        mask: [B, T]; tokens outside it are skipped, as if the row were compacted.
        gamma: discount per token.
        lam: GAE lambda.

    Returns:
        advantages and returns = advantages + values, [B, T] in float32 or better, 0 outside the mask.
    """
    counts = mask.bool()
    rewards = keep(rewards, mask)
    values = keep(values, mask)
    advantages = torch.zeros_like(rewards + values)
    next_value = next_advantage = advantages.new_zeros(len(advantages))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(counts[:, t], advantage, 0.0)
        next_advantage = torch.where(counts[:, t], advantage, next_advantage)
        next_value = torch.where(counts[:, t], values[:, t], next_value)
    return advantages, keep(advantages + values, mask)
