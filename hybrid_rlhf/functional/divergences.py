"""Estimators of KL(policy || reference) per token, from samples of the policy.

Source: Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); bounds of k3 as in verl
(core_algos.py, kl_penalty_forward). All in float32 or better.

The gradient of an estimator is not an estimate of the gradient. For samples x of the policy p, the gradient of
KL(p || ref) is E[log(p(x) / ref(x)) grad log p(x)]. The gradient of k2 at a sample has that mean; the gradient of k3
has the mean E[(1 - ref(x) / p(x)) grad log p(x)], which is the gradient of KL(ref || p). `kl_loss` therefore takes its
value from the chosen estimator and its gradient from k2.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hybrid_rlhf.functional.losses import MAX_LOG_RATIO
from hybrid_rlhf.functional.masking import at_least_float32

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
