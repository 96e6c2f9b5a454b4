"""CISPO: the clipped ratio is a weight of REINFORCE's gradient, so that clipping removes no token's gradient.

Source: MiniMax-M1 2025 (arXiv 2506.13585), eq. 4 and 5; an upper bound of 5 as in arXiv 2510.13786.

    loss_t = -sg(clip(ratio_t, 1 - clip_low, 1 + clip_high)) A_t log p_t

Advantages are GRPO's; the mean is over all tokens. With clip_low 1 there is no lower bound, as in the paper.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.configs.algorithms import CISPOConfig
from hybrid_rlhf.functional.losses import bounded_ratio
from hybrid_rlhf.rl.algorithms.grpo import TokenLossGRPO


class CISPO(TokenLossGRPO):
    """REINFORCE's gradient weighted by clipped ratios, with GRPO's advantages."""

    config: CISPOConfig

    def token_losses(
        self, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return -sg(clip(ratio)) A log p."""
        ratio = bounded_ratio(log_ratio.detach(), mask=mask)
        weight = ratio.clamp(1 - self.config.clip[0], 1 + self.config.clip[1])
        return -weight * advantages * logprobs, weight != ratio
