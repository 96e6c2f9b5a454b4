"""Estimates of KL(policy || reference) a token, from samples of the policy.

Source: Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). All in float32 or better.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.functional.masking import at_least_float32


def kl_k1(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """log-ratio: unbiased, high variance, may be negative. The penalty of InstructGPT."""
    return at_least_float32(logprobs) - at_least_float32(ref_logprobs)


def kl_k2(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio: biased, low variance, never negative; its gradient is that of the KL."""
    return 0.5 * kl_k1(logprobs, ref_logprobs=ref_logprobs).square()


def kl_k3(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """r - 1 - log r with r = reference / policy: unbiased, low variance, never negative."""
    log_ratio = -kl_k1(logprobs, ref_logprobs=ref_logprobs)
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
