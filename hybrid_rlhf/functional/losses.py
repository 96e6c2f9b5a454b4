"""Losses of SFT, reward model, policy and value function, as sums with the count to divide them by.

With them the weights of tokens in the actor's loss, and estimators of KL(policy || reference) per token.

A mean over a micro-batch or a rank would give its rows a weight that depends on the split. The caller adds the counts
of all micro-batches and ranks and divides once, so that gradients do not depend on the split. Weights are relative to
the mean over the tokens of a mini-batch, so that the divisor is the number of tokens for any weights.

Each loss states its source and deviations.

Source of the estimators: Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); bounds of k3 as in
verl (core_algos.py, kl_penalty_forward). All in float32 or better. The gradient of an estimator is not an estimate of
the gradient. For samples x of the policy p, the gradient of KL(p || ref) is E[log(p(x) / ref(x)) grad log p(x)]. The
gradient of k2 at a sample has that mean; the gradient of k3 has the mean E[(1 - ref(x) / p(x)) grad log p(x)], which is
the gradient of KL(ref || p). `kl_loss` therefore takes its value from the chosen estimator and its gradient from k2.

Shapes: B batch, T time, N pairs. Masks are bool or 0/1; 1 counts. All tensors of a loss with a mask have its shape; any
other shape raises ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.functional.masking import at_least_float32, keep, masked_sum, row_sums

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


def sft_loss(logprobs: Tensor, *, mask: Tensor, by_probability: bool = False) -> LossSum:
    """Negative log-likelihood of the tokens that count; logprobs and mask [B, T].

    `by_probability`: each token's is multiplied by its probability, which has no gradient (DFT, arXiv
    2508.05629); the stat `nll` has the plain sum.
    """
    if not by_probability:
        return LossSum(-masked_sum(logprobs, mask=mask), _count(mask))
    current = keep(logprobs.detach(), mask)
    weighted = -masked_sum(current.exp() * keep(logprobs, mask), mask=mask)
    return LossSum(weighted, _count(mask), {"nll": -current.sum()})


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
    return LossSum(loss.sum(), torch.full((), float(len(chosen)), device=chosen.device), stats)


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
    """The clipped surrogate of PPO, summed over tokens.

    Source: arXiv 1707.06347, eq. 7; separate bounds as in DAPO (arXiv 2503.14476, eq. 10); dual clip of
    arXiv 1912.09729, eq. 5. Deviation: ratios are at most exp(MAX_LOG_RATIO), as in verl.

    Args:
        log_ratio: [B, T], log-ratio of the current actor to the one that sampled, of each token or its sequence (GSPO).
        advantages: [B, T], advantage of each token.
        mask: [B, T], 1 on completion tokens.
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
        dual_clip: bound of the loss for negative advantages, as a multiple of their size; above 1, or None.
        weights: [B, T] or [B, 1], factor of each token's loss; None: 1.

    Returns:
        the loss, with stats: ratio; approxkl, 0.5 * (log-ratio)^2 (as in TRL); clipfrac, tokens whose ratio is clipped.

    Raises:
        ValueError: when dual_clip is 1 or less, which would bound the surrogate itself.
    """
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


def probability_surrogate(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
) -> LossSum:
    """The surrogate of PPO without tokens whose probability has changed too far in the direction of their advantage,
    summed over tokens.

    Source: DPPO (arXiv 2602.04879), the mask of its binary total variation, as in verl (dppo_tv) and prime-rl.
    Deviation: ratios are at most exp(MAX_LOG_RATIO), where verl truncates them at 20.

    Args:
        logprobs: [B, T] of the current actor, with gradient.
        old_logprobs: [B, T] of the actor that sampled.
        advantages: [B, T], advantage of each token.
        mask: [B, T], 1 on completion tokens.
        clip_low: largest decrease of a token's probability that is learned from, where its advantage is not positive.
        clip_high: largest increase, where its advantage is positive.
        weights: [B, T] or [B, 1], factor of each token's loss; None: 1.

    Returns:
        the loss, with the stats of clipped_surrogate.
    """
    logprobs, old_logprobs, advantages = (keep(values, mask) for values in (logprobs, old_logprobs, advantages))
    log_ratio = logprobs - old_logprobs
    change = logprobs.detach().exp() - old_logprobs.exp()
    clipped = torch.where(advantages > 0, change > clip_high, change < -clip_low)
    loss = torch.where(clipped, 0.0, -advantages * bounded_ratio(log_ratio, mask=mask))
    return policy_sum(loss, log_ratio=log_ratio, mask=mask, clipped=clipped, weights=weights)


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
        the loss, with the stats of clipped_surrogate.
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


K3_MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-K3_MAX_LOG_RATIO in k3; exp(20) is 4.9e8."""
K3_MAX = 10.0
"""Largest value of k3, in nats per token."""


def kl_k1(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """Log-ratio: unbiased, high variance, may be negative; the penalty of InstructGPT."""
    return at_least_float32(logprobs) - at_least_float32(ref_logprobs)


def kl_k2(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio: biased, low variance, never negative; its gradient is that of the KL."""
    return 0.5 * kl_k1(logprobs, ref_logprobs=ref_logprobs).square()


def kl_k3(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """r - 1 - log r with r = reference / policy: low variance, never negative, unbiased except for its bounds.

    log r is clamped to +-K3_MAX_LOG_RATIO, the result to K3_MAX.
    """
    log_ratio = -kl_k1(logprobs, ref_logprobs=ref_logprobs).clamp(-K3_MAX_LOG_RATIO, K3_MAX_LOG_RATIO)
    return (log_ratio.expm1() - log_ratio).clamp(max=K3_MAX)


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_loss(logprobs: Tensor, *, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k2", "k3"]) -> Tensor:
    """KL(policy || reference) per token as a term of a loss, with the gradient of the KL.

    Tokens were sampled from the old policy, so each is weighted with sg[policy / old] (DeepSeek-V3.2, arXiv
    2512.02556; TRL's use_bias_correction_kl), which is 1 in the first update on a rollout. The gradient is that of
    sg[policy / old] * k2, whose mean over samples of old is the gradient of the KL (verl's straight-through "k3+").
    Where k3 is not clamped, that is also the gradient of (policy / old) * k3 with a differentiated ratio; where it is,
    the gradient continues to grow with the log-ratio, so that a token far from the reference is still pulled back.

    Args:
        logprobs: [B, T], log-probs of the current policy, with gradient.
        old_logprobs: [B, T], log-probs of the policy that sampled; the ratio is at most exp(MAX_LOG_RATIO).
        ref_logprobs: [B, T], log-probs of the reference.
        estimator: estimator of the value.

    Returns:
        [B, T] in float32 or better; its value is sg[policy / old] times the estimator's.
    """
    k2 = kl_k2(logprobs, ref_logprobs=ref_logprobs.detach())
    value = KL_ESTIMATORS[estimator](logprobs.detach(), ref_logprobs=ref_logprobs.detach())
    ratio = kl_k1(logprobs.detach(), ref_logprobs=old_logprobs.detach()).clamp(max=MAX_LOG_RATIO).exp()
    return ratio * (value + (k2 - k2.detach()))


def length_weights(
    mask: Tensor,
    *,
    normalization: Literal["token", "sequence", "sequence_sum", "fixed"],
    tokens: float,
    sequences: float,
    max_tokens: int,
    kept: Tensor | None = None,
    kept_tokens: float | None = None,
) -> Tensor:
    """Weights [B, 1] float32 that turn the mean over tokens into the mean of a normalisation.

    Source: token, DAPO (arXiv 2503.14476, eq. 10); sequence, GRPO (arXiv 2402.03300, eq. 3); sequence_sum, LUSPO
    (arXiv 2602.05261), as in TRL (loss_type luspo); fixed, Dr. GRPO (arXiv 2503.20783, section 3.2).

    Args:
        mask: [B, T], 1 on completion tokens.
        normalization: token, equal weight per token; sequence, equal weight per sequence; sequence_sum and fixed, equal
            weight per token, and the sum divided by 1 or max_tokens per sequence.
        tokens: completion tokens of the mini-batch, over all ranks.
        sequences: completions of the mini-batch, over all ranks.
        max_tokens: maximum length of a completion.
        kept: [B, T], 1 on the completion tokens that the mean is over; None: all of them.
        kept_tokens: kept tokens of the mini-batch, over all ranks; required with kept.
    """
    lengths = (mask.bool() if kept is None else kept.bool() & mask.bool()).sum(dim=1, keepdim=True).float()
    if normalization == "token":
        return torch.full_like(lengths, 1.0 if kept_tokens is None else tokens / max(kept_tokens, 1.0))
    constant = 1.0 if normalization == "sequence_sum" else max_tokens
    divisor = lengths.clamp(min=1) if normalization == "sequence" else torch.full_like(lengths, constant)
    return tokens / (sequences * divisor)


def sampler_ratio(
    old_logprobs: Tensor,
    *,
    sampler_logprobs: Tensor,
    mask: Tensor,
    of: Literal["token", "sequence", "geometric"] = "token",
) -> Tensor:
    """Ratios [B, T] of the training distribution to the one that was sampled from; without gradient.

    The gradient of the expected reward under the training distribution, estimated from samples of another one, needs
    the ratio of the whole completion, a product whose variance grows with its length. The ratio of a token leaves out
    those of the tokens before it, and the geometric mean is no importance weight at all; both have bounded variance.
    Source: Liu et al. 2025, "When Speed Kills Stability" (yingru.notion.site), section 4.2.1.

    Args:
        old_logprobs: [B, T], log-probs of the training forward with the weights that sampled.
        sampler_logprobs: [B, T], log-probs under the distribution that was sampled from.
        mask: [B, T], 1 on completion tokens.
        of: token, each token's ratio; sequence, their product over the completion, or geometric, its geometric mean,
            which all tokens of the completion have. At most exp(MAX_LOG_RATIO).
    """
    log_ratio = keep(old_logprobs.detach(), mask) - keep(sampler_logprobs, mask)
    if of != "token":
        of_row = row_sums(log_ratio)
        if of == "geometric":
            of_row = of_row / mask.bool().sum(dim=1).clamp(min=1)
        log_ratio = of_row[:, None].expand(mask.shape)
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def correction_weights(ratio: Tensor, *, how: Literal["truncate", "mask"], clip: float, low: float) -> Tensor:
    """Importance weights [B, T] from the ratios [B, T] of `sampler_ratio`.

    Source: truncated importance sampling (TIS), fengyao.notion.site/off-policy-rl (2025); masked, of tokens, IcePop
    (ringtech.notion.site/icepop), and of sequences, MIS, "When Speed Kills Stability"; all of the same year.

    Args:
        ratio: [B, T].
        how: truncate limits weights to clip; mask sets those outside [low, clip] to 0.
        clip: upper bound, 1 or more.
        low: lower bound of mask, from 0 to 1.
    """
    return ratio.clamp(max=clip) if how == "truncate" else torch.where(_within(ratio, low, clip), ratio, 0.0)


def accepted_completions(ratio: Tensor, *, mask: Tensor, low: float, high: float) -> Tensor:
    """Completions [B, 1] bool all of whose ratios [B, T] are within [low, high].

    Source: verl's rollout_corr.md (rejection by the geometric mean, and by any token: "veto").
    """
    return (_within(ratio, low, high) | ~mask.bool()).all(dim=1, keepdim=True)


def _within(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)
