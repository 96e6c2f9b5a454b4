"""GSPO: one ratio per sequence, the geometric mean of its tokens' ratios, and one clip.

Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 5 to 7.

    s_i = (p(y_i) / p_old(y_i))^(1 / |y_i|),  loss = -1/G sum_i min(s_i A_i, clip(s_i) A_i)

Advantages are GRPO's. Each token contributes separately to the gradient, through s_it = sg[s_i] p_it / sg[p_it]
(section 4.3; verl's compute_policy_loss_gspo). Loss and gradient are the same if all tokens of a sequence have equal
weights; a token of weight 0 (algorithm.correction.method mask) has no gradient, but counts in the log-ratio of s_i.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.configs.algorithms import GSPOConfig
from hybrid_rlhf.functional.masking import masked_mean
from hybrid_rlhf.rl.algorithms.grpo import GRPO
from hybrid_rlhf.rl.types import Rollout


class GSPO(GRPO):
    """The clipped surrogate of a sequence's ratio, with GRPO's advantages."""

    config: GSPOConfig

    def log_ratios(self, logprobs: Tensor, rollout: Rollout) -> Tensor:
        """Return the log-ratio of each sequence at its tokens, with the gradient of each token's own, [B, T]."""
        log_ratio = super().log_ratios(logprobs, rollout)
        of_sequence = masked_mean(log_ratio.detach(), mask=rollout.response_mask, dim=1)[:, None]
        return of_sequence + (log_ratio - log_ratio.detach())
