"""CISPO: the ratio is a clipped weight of REINFORCE's gradient, so that no token loses its own.

Source: MiniMax-M1 2025 (arXiv 2506.13585), eq. 4 and 5; an upper bound of 5 as in arXiv 2510.13786.

    loss_t = -sg(clip(ratio_t, 1 - clip_low, 1 + clip_high)) A_t log p_t

Advantages are GRPO's; the mean is over all tokens. With clip_low 1 there is no lower bound, as in the paper.
"""

from __future__ import annotations

from hybrid_rlhf.algorithms.on_policy.algorithm import Tokens
from hybrid_rlhf.algorithms.on_policy.grpo import GRPO
from hybrid_rlhf.functional.losses import LossSum, bounded_ratio, policy_sum
from hybrid_rlhf.functional.masking import keep


class CISPO(GRPO):
    """Log-probs weighed by clipped ratios."""

    def loss(self, tokens: Tokens) -> LossSum:
        """See OnPolicyAlgorithm."""
        mask, logprobs = tokens.mask, keep(tokens.logprobs, tokens.mask)
        log_ratio = logprobs.detach() - keep(tokens.old_logprobs, mask)
        ratio = bounded_ratio(log_ratio, mask=mask)
        weight = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        loss = -weight * keep(tokens.advantages, mask) * logprobs
        return policy_sum(loss, log_ratio=log_ratio, mask=mask, clipped=weight != ratio, weights=tokens.weights)
