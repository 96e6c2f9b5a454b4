"""Losses of SFT, reward model, policy and value function, as sums with the count to divide them by.

A mean over a micro-batch or a rank would give its rows a weight that depends on the split. The caller adds the counts
of all micro-batches and ranks and divides once, so that gradients do not depend on the split.

Each loss states its source and deviations.

Shapes: B batch, T time, N pairs. Masks are bool or 0/1; 1 counts. All tensors of a loss with a mask have its shape; any
other shape raises ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.functional.masking import at_least_float32, keep, masked_sum

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to it: a ratio that overflows gives NaN gradients even where the loss is clipped."""


@dataclass(frozen=True)
class LossSum:
    """A loss before its division by the count."""

    total: Tensor
    """Scalar sum, with gradient."""
    count: Tensor
    """Scalar float32, without gradient: number of entries in the sum."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Scalar sums over the same entries, without gradient."""


def sft_loss(logprobs: Tensor, *, mask: Tensor) -> LossSum:
    """Negative log-likelihood of the tokens that count; logprobs and mask [B, T]."""
    return LossSum(-masked_sum(logprobs, mask=mask), _count(mask))


def pairwise_reward_loss(
    chosen: Tensor, *, rejected: Tensor, margin: Tensor | None = None, centering_coef: float = 0.0
) -> LossSum:
    """Bradley-Terry: -log sigmoid(chosen - rejected - margin), summed over pairs.

    Source: InstructGPT, eq. 1 (equal weight per pair, also within a ranked list); the margin of Llama 2
    (arXiv 2307.09288, eq. 2); the centring term of arXiv 2312.09244, section 2.

    Args:
        chosen: [N] scores of the chosen completions.
        rejected: [N] scores of the rejected completions.
        margin: [N], margin by which chosen should exceed rejected; None: 0.
        centering_coef: weight of (chosen + rejected)^2.

    Returns:
        the loss, with stats: accuracy, where a tie counts 0; margin, chosen - rejected; chosen_score; rejected_score.
    """
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    lead = chosen - rejected
    loss = -logsigmoid(lead if margin is None else lead - at_least_float32(margin))
    if centering_coef:
        loss = loss + centering_coef * (chosen + rejected).square()
    stats = {
        "accuracy": (lead > 0).float().sum(),
        "margin": lead.detach().sum(),
        "chosen_score": chosen.detach().sum(),
        "rejected_score": rejected.detach().sum(),
    }
    return LossSum(loss.sum(), torch.tensor(float(len(chosen)), device=chosen.device), stats)


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
    arXiv 1912.09729, eq. 5. Deviation: ratios are at most exp(MAX_LOG_RATIO), as in verl.

    Args:
        logprobs: [B, T], log-probs under the current actor.
        old_logprobs: [B, T], log-probs under the actor that sampled.
        advantages: [B, T], advantage of each token.
        mask: [B, T], 1 on completion tokens.
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
        dual_clip: bound of the loss for negative advantages, as a multiple of their size; above 1, or None.
        weights: [B, T] or [B, 1], factor of each token's loss (aggregation.py); None: 1.

    Returns:
        the loss, with stats: ratio; approxkl, 0.5 * (log-ratio)^2 (as in TRL); clipfrac, tokens whose ratio is clipped.

    Raises:
        ValueError: when dual_clip is 1 or less, which would bound the surrogate itself.
    """
    log_ratio = keep(logprobs, mask) - keep(old_logprobs, mask)
    return clipped_surrogate(
        log_ratio,
        advantages=advantages,
        mask=mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        weights=weights,
    )


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
    """`ppo_policy_loss` from log-ratios [B, T] of each token, or of its sequence (GSPO)."""
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1 or none, got {dual_clip}")
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
    """The sum of an actor's losses [B, T] per token, with the statistics that every policy loss logs.

    Args:
        loss: [B, T], loss of each token.
        log_ratio: [B, T], log-ratio of the current actor to the one that sampled.
        mask: [B, T], 1 on completion tokens.
        clipped: [B, T] bool, true where the loss is clipped; None: nowhere.
        weights: [B, T] or [B, 1], factor of each token's loss; None: 1.

    Returns:
        the loss, with the stats of ppo_policy_loss.
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
    """Half the squared error of values, or of values clipped around the old ones if that is larger; summed over tokens.

    Source: N details, no. 19.

    Args:
        values: [B, T], values of the current critic.
        old_values: [B, T], values of the critic at sampling time.
        returns: [B, T] targets.
        mask: [B, T], 1 on completion tokens.
        clip: largest change from old_values; None or 0: not clipped.

    Returns:
        the loss, with stats: clipfrac, tokens where the clipped error is larger; squared_error, (returns - values)^2
            without clip.
    """
    values = keep(values, mask)
    old_values = keep(old_values, mask)
    returns = keep(returns, mask)
    error = (values - returns).square()
    worst = error
    if clip:
        near = old_values + (values - old_values).clamp(-clip, clip)
        worst = torch.maximum(error, (near - returns).square())
    stats = {
        "clipfrac": masked_sum((worst > error).float(), mask=mask),
        "squared_error": masked_sum(error.detach(), mask=mask),
    }
    return LossSum(0.5 * masked_sum(worst, mask=mask), _count(mask), stats)


def _count(mask: Tensor) -> Tensor:
    return mask.bool().sum().float()
