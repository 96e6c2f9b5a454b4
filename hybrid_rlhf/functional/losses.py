"""The four losses, as sums with the count they are to be divided by.

Why sums: a mean over a micro-batch or a rank gives its rows a weight that depends on the split. The caller adds the
counts of all micro-batches and ranks and divides once, so that no split changes a gradient.

Sources and deviations stand with each loss.

Shapes: B batch, T time, N pairs. Masks are bool or 0/1; 1 counts. All tensors of a loss have the same shape; another
is a ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.functional.masking import keep, masked_sum

MAX_LOG_RATIO = 20.0
"""Above, a ratio counts as exp(20): one that overflows gives NaN gradients even where the loss is clipped."""


@dataclass(frozen=True)
class LossSum:
    """A loss before its division."""

    total: Tensor
    """Scalar sum, with gradient."""
    count: Tensor
    """Scalar float32, without gradient: how many entries the sum is over."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Scalar sums over the same entries, without gradient."""


def sft_loss(logprobs: Tensor, *, mask: Tensor) -> LossSum:
    """Negative log-likelihood of the tokens that count; logprobs and mask [B, T]."""
    return LossSum(-masked_sum(logprobs, mask=mask), _count(mask))


def pairwise_reward_loss(
    chosen: Tensor,
    *,
    rejected: Tensor,
    margin: Tensor | None = None,
    mask: Tensor | None = None,
    centering_coef: float = 0.0,
) -> LossSum:
    """Bradley-Terry: -log sigmoid(chosen - rejected - margin), summed over pairs.

    Source: InstructGPT, eq. 1 (each pair counts alike, also those of a ranked list); the margin of Llama 2
    (arXiv 2307.09288, eq. 2); the centring term of arXiv 2312.09244, section 2.

    Args:
        chosen: [N] scores of the better answers.
        rejected: [N] scores of the worse ones.
        margin: [N], by how much the better should lead; none: 0.
        mask: [N], 0 on pairs that only pad; none: all count.
        centering_coef: weight of (chosen + rejected)^2.

    Returns:
        stats: accuracy, where a tie counts 0; margin, the lead of the chosen; chosen_score; rejected_score.
    """
    if mask is None:
        mask = torch.ones_like(chosen, dtype=torch.bool)
    chosen, rejected = keep(chosen, mask), keep(rejected, mask)
    lead = chosen - rejected
    loss = -logsigmoid(lead if margin is None else lead - keep(margin, mask))
    if centering_coef:
        loss = loss + centering_coef * (chosen + rejected).square()
    stats = {
        "accuracy": (lead > 0).float().sum(),
        "margin": lead.detach().sum(),
        "chosen_score": chosen.detach().sum(),
        "rejected_score": rejected.detach().sum(),
    }
    return LossSum(masked_sum(loss, mask=mask), _count(mask), stats)


def ppo_policy_loss(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """The clipped surrogate of PPO, summed over tokens.

    Source: arXiv 1707.06347, eq. 7; separate bounds as in DAPO (arXiv 2503.14476, eq. 10); dual clip of
    arXiv 1912.09729, eq. 5. Deviation: ratios end at exp(MAX_LOG_RATIO), as in verl.

    Args:
        logprobs: [B, T] under the current actor.
        old_logprobs: [B, T] when sampled.
        advantages: [B, T].
        mask: [B, T], 1 on response tokens.
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
        dual_clip: for negative advantages the loss is at most dual_clip times their size; above 1, or none.
        weights: [B, T] or [B, 1], of each token's loss (aggregation.py); none: 1.

    Returns:
        stats: ratio; approxkl, 0.5 * (log-ratio)^2 (TRL's); clipfrac, tokens where the clip binds.

    Raises:
        ValueError: dual_clip is not above 1: it would cut into the surrogate itself.
    """
    log_ratio = keep(logprobs, mask) - keep(old_logprobs, mask)
    return clipped_surrogate(
        log_ratio, advantages=advantages, mask=mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip,
        weights=weights,
    )  # fmt: skip


def clipped_surrogate(
    log_ratio: Tensor,
    *,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """`ppo_policy_loss` of log-ratios [B, T], whatever they are of: a token, or its sequence (GSPO)."""
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip is above 1, or none: {dual_clip}")
    advantages = keep(advantages, mask)
    ratio = bounded_ratio(log_ratio, mask=mask)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return policy_sum(loss, log_ratio=log_ratio, mask=mask, clipped=clipped > plain, weights=weights)


def bounded_ratio(log_ratio: Tensor, *, mask: Tensor) -> Tensor:
    """exp of log-ratios [B, T], at most exp(MAX_LOG_RATIO)."""
    return keep(log_ratio, mask).clamp(max=MAX_LOG_RATIO).exp()


def policy_sum(
    loss: Tensor, *, log_ratio: Tensor, mask: Tensor, clipped: Tensor | None = None, weights: Tensor | None = None
) -> LossSum:
    """The sum of an actor's losses [B, T] a token, with what is logged of any of them.

    Args:
        loss: [B, T].
        log_ratio: [B, T] of the current actor to the one that sampled.
        mask: [B, T], 1 on response tokens.
        clipped: [B, T] bool, where a clip binds; none: nowhere.
        weights: [B, T] or [B, 1], of each token's loss; none: 1.

    Returns:
        stats: see ppo_policy_loss.
    """
    if weights is not None:
        loss = loss * keep(weights.expand_as(loss), mask)
    log_ratio = keep(log_ratio.detach(), mask)
    stats = {
        "ratio": masked_sum(bounded_ratio(log_ratio, mask=mask), mask=mask),
        "approxkl": masked_sum(0.5 * log_ratio.square(), mask=mask),
        "clipfrac": torch.zeros_like(loss).sum() if clipped is None else masked_sum(clipped.float(), mask=mask),
    }
    return LossSum(masked_sum(loss, mask=mask), _count(mask), stats)


def ppo_value_loss(values: Tensor, *, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> LossSum:
    """Half the squared error, at least that of the values held near the old ones; summed over tokens.

    Source: N details, no. 19.

    Args:
        values: [B, T] of the current critic.
        old_values: [B, T] when sampled.
        returns: [B, T] targets.
        mask: [B, T], 1 on response tokens.
        clip: how far values may move from old_values; none or 0 does not clip.

    Returns:
        stats: clipfrac, tokens where the clip binds; squared_error, (returns - values)^2 of the plain values.
    """
    values, old_values, returns = keep(values, mask), keep(old_values, mask), keep(returns, mask)
    error = (values - returns).square()
    worst = error
    if clip:
        held = old_values + (values - old_values).clamp(-clip, clip)
        worst = torch.maximum(error, (held - returns).square())
    stats = {
        "clipfrac": masked_sum((worst > error).float(), mask=mask),
        "squared_error": masked_sum(error.detach(), mask=mask),
    }
    return LossSum(0.5 * masked_sum(worst, mask=mask), _count(mask), stats)


def _count(mask: Tensor) -> Tensor:
    return mask.bool().sum().float()
