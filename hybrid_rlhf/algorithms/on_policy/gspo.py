"""GSPO: one ratio a sequence, the geometric mean of its tokens', and one clip.

Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 5 to 7.

    s_i = (p(y_i) / p_old(y_i))^(1 / |y_i|),  loss = -1/G sum_i min(s_i A_i, clip(s_i) A_i)

Advantages are GRPO's.
"""

from __future__ import annotations

from hybrid_rlhf.algorithms.on_policy.algorithm import Tokens
from hybrid_rlhf.algorithms.on_policy.grpo import GRPO
from hybrid_rlhf.functional.losses import LossSum, clipped_surrogate
from hybrid_rlhf.functional.masking import keep, masked_mean


class GSPO(GRPO):
    """The clipped surrogate of a sequence's ratio."""

    def loss(self, tokens: Tokens) -> LossSum:
        """See OnPolicyAlgorithm."""
        mask = tokens.mask
        log_ratio = keep(tokens.logprobs, mask) - keep(tokens.old_logprobs, mask)
        of_sequence = masked_mean(log_ratio, mask=mask, dim=1)[:, None].expand_as(log_ratio)
        return clipped_surrogate(
            of_sequence, advantages=tokens.advantages, mask=mask, weights=tokens.weights,
            clip_low=self.config.clip_low, clip_high=self.config.clip_high, dual_clip=self.config.dual_clip,
        )  # fmt: skip
