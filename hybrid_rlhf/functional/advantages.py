"""Rewards per token, advantages by GAE, their covariance with log-probs, and statistics over the completions of each
prompt.

Source: GAE, Schulman et al. 2015 (arXiv 1506.02438), eq. 16; KL-shaped rewards, Ouyang et al. 2022 (arXiv 2203.02155),
eq. 2, and N details, no. 17. Deviation: the mask of a row may have gaps (turns of a user or a tool), which count as no
time steps.

The number of completions may differ between prompts. If all values of a group are equal, their mean is exactly that
value, so that deviations are exactly 0: `differs_in_group` and the statistics agree on which groups are equal. Results
are float32 or better; statistics of groups are not meant to be differentiated.

Shapes: B batch, T time; N completions, whose prompts groups [N] identifies by any integer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

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


def gae(rewards: Tensor, *, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages, not whitened, and returns.

    Args:
        rewards: [B, T], rewards per token.
        values: [B, T], V of the state in which token t is chosen.
        mask: [B, T]; tokens outside it are skipped, as if the row were compacted.
        gamma: discount per token.
        lam: GAE lambda, of all rows or of each, [B].

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


def covariance_terms(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    mask: Tensor,
    total: Callable[[Tensor], Tensor] = lambda partial: partial,
) -> Tensor:
    """Contribution of each token to the covariance of log-probs and advantages: the product of their deviations from
    their means (arXiv 2505.22617, section 4).

    Args:
        logprobs: [B, T].
        advantages: [B, T].
        mask: [B, T], 1 on completion tokens.
        total: sums numbers over the ranks, as in `masked_whiten`.

    Returns:
        [B, T] in float64, 0 outside the mask.
    """
    pair = torch.stack([keep(logprobs, mask), keep(advantages, mask)]).double()
    *sums, count = total(torch.stack([*pair.sum(dim=(1, 2)), mask.bool().sum().double()]))
    logprobs, advantages = pair - torch.stack(sums)[:, None, None] / count.clamp(min=1)
    return keep(logprobs * advantages, mask)


def _group_sum(values: Tensor, *, groups: Tensor) -> Tensor:
    """Sum [N] of each completion's group, in the dtype of the values."""
    _, member = groups.unique(return_inverse=True)
    return torch.zeros_like(values).index_add(0, member, values)[member]


def group_size(groups: Tensor) -> Tensor:
    """Number of completions [N] float32 in each completion's group."""
    return _group_sum(torch.ones(len(groups), device=groups.device), groups=groups)


def group_mean(values: Tensor, *, groups: Tensor) -> Tensor:
    """Mean [N] of each completion's group."""
    values = at_least_float32(values)
    low = _of_group(values, groups, "amin")  # a sum of equal values divided by their number would be rounded
    return low + _group_sum(values - low, groups=groups) / group_size(groups)


def group_std(values: Tensor, *, groups: Tensor) -> Tensor:
    """Unbiased standard deviation [N] of each completion's group; 0 in a group of one."""
    centred = at_least_float32(values) - group_mean(values, groups=groups)
    squares = _group_sum(centred.square(), groups=groups)
    return (squares / (group_size(groups) - 1).clamp(min=1)).sqrt()


def leave_one_out(values: Tensor, *, groups: Tensor) -> Tensor:
    """Each value [N] minus the mean of the other values of its group; 0 in a group of one."""
    size = group_size(groups)
    return (at_least_float32(values) - group_mean(values, groups=groups)) * size / (size - 1).clamp(min=1)


def differs_in_group(values: Tensor, *, groups: Tensor) -> Tensor:
    """True where the values of a completion's group are not all equal, [N] bool."""
    return _of_group(values, groups, "amax") > _of_group(values, groups, "amin")


def rank_in_group(values: Tensor, *, groups: Tensor) -> Tensor:
    """Rank [N] int64 of each value in its group, 0 for the highest; of equal values the earlier ranks higher."""
    by_value = torch.sort(values, descending=True, stable=True).indices
    order = by_value[torch.sort(groups[by_value], stable=True).indices]
    ordered = groups[order]
    positions = torch.arange(len(order), device=order.device)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    start = torch.where(begins, positions, 0).cummax(0).values
    return torch.empty_like(order).scatter(0, order, positions - start)


def _of_group(values: Tensor, groups: Tensor, extreme: Literal["amin", "amax"]) -> Tensor:
    """The smallest or largest value [N] in each completion's group."""
    order, member = groups.unique(return_inverse=True)
    empty = torch.zeros(len(order), dtype=values.dtype, device=values.device)
    return empty.scatter_reduce(0, member, values, extreme, include_self=False)[member]
