"""GMPO: the geometric mean of a completion's ratios, each clipped before the mean.

Source: Zhao et al. 2025 (arXiv 2507.20673).

    loss = -1/G sum_i A_i (prod_t c(r_it))^(1 / |o_i|),  c(r) = min(r, 1 + high) if A_i > 0, else max(r, 1 - low)

Advantages are GRPO's. A token whose ratio is clipped has no gradient; GSPO clips the mean instead. As there (gspo.py),
each token contributes separately to the gradient, so that a token of weight 0 has none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import GMPOConfig
from hybrid_rlhf.functional.losses import bounded_ratio
from hybrid_rlhf.functional.masking import masked_mean
from hybrid_rlhf.rl.algorithms.grpo import TokenLossGRPO


class GMPO(TokenLossGRPO):
    """The geometric mean of clipped ratios, with GRPO's advantages."""

    config: GMPOConfig

    def token_losses(
        self, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return -A times the geometric mean of the clipped ratios."""
        low, high = self.config.clip
        lowest = math.log(1 - low) if low < 1 else -math.inf
        clipped = torch.where(advantages > 0, log_ratio.clamp(max=math.log(1 + high)), log_ratio.clamp(min=lowest))
        of_sequence = masked_mean(clipped.detach(), mask=mask, dim=1)[:, None]
        ratio = bounded_ratio(of_sequence + (clipped - clipped.detach()), mask=mask)
        return -advantages * ratio, clipped != log_ratio
