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
from hybrid_rlhf.functional.losses import LossSum, clipped_surrogate
from hybrid_rlhf.functional.masking import masked_mean
from hybrid_rlhf.rl.algorithms.algorithm import log_ratios
from hybrid_rlhf.rl.algorithms.grpo import GRPO
from hybrid_rlhf.rl.types import Batch


class GSPO(GRPO):
    """The clipped surrogate of a sequence's ratio, with GRPO's advantages."""

    config: GSPOConfig

    def loss(self, logprobs: Tensor, batch: Batch, *, weights: Tensor, tokens_per_completion: float) -> LossSum:
        """Return the clipped surrogate of the sequence ratios, summed over the tokens of a micro-batch."""
        mask = batch.rollout.response_mask
        log_ratio = log_ratios(logprobs, batch.rollout)
        of_sequence = masked_mean(log_ratio.detach(), mask=mask, dim=1)[:, None]
        of_tokens = of_sequence + (log_ratio - log_ratio.detach())
        return clipped_surrogate(
            of_tokens,
            advantages=batch.advantages,
            mask=mask,
            weights=weights,
            clip_low=self.config.clip[0],
            clip_high=self.config.clip[1],
            dual_clip=self.config.dual_clip,
        )
