"""CISPO: the clipped ratio is a weight of REINFORCE's gradient, so that clipping removes no token's gradient.

Source: MiniMax-M1 2025 (arXiv 2506.13585), eq. 4 and 5; an upper bound of 5 as in arXiv 2510.13786.

    loss_t = -sg(clip(ratio_t, 1 - clip_low, 1 + clip_high)) A_t log p_t

Advantages are GRPO's; the mean is over all tokens. With clip_low 1 there is no lower bound, as in the paper.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.configs.algorithms import CISPOConfig
from hybrid_rlhf.functional.losses import LossSum, bounded_ratio, policy_sum
from hybrid_rlhf.functional.masking import keep
from hybrid_rlhf.rl.algorithms.algorithm import log_ratios
from hybrid_rlhf.rl.algorithms.grpo import GRPO
from hybrid_rlhf.rl.types import Batch


class CISPO(GRPO):
    """REINFORCE's gradient weighted by clipped ratios, with GRPO's advantages."""

    config: CISPOConfig

    def loss(self, logprobs: Tensor, batch: Batch, *, weights: Tensor, tokens_per_completion: float) -> LossSum:
        """Return -sg(clip(ratio)) A log p, summed over the tokens of a micro-batch."""
        mask = batch.rollout.response_mask
        logprobs = keep(logprobs, mask)
        log_ratio = log_ratios(logprobs.detach(), batch.rollout)
        ratio = bounded_ratio(log_ratio, mask=mask)
        weight = ratio.clamp(1 - self.config.clip[0], 1 + self.config.clip[1])
        loss = -weight * keep(batch.advantages, mask) * logprobs
        return policy_sum(loss, log_ratio=log_ratio, mask=mask, clipped=weight != ratio, weights=weights)
