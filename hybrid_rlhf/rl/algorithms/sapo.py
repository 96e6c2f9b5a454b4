"""SAPO: a sigmoid of the ratio in place of a clip, so that the gradient fades instead of ending.

Source: Gao et al. 2025 (arXiv 2511.20347); TRL's loss_type sapo.

    loss_t = -A f(r_t),  f(r) = 4 / tau * sigmoid(tau (r - 1)),  tau larger for A <= 0

The slope of f is 1 at r = 1, where the gradient is that of the plain surrogate. Advantages are GRPO's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import SAPOConfig
from hybrid_rlhf.functional.losses import bounded_ratio
from hybrid_rlhf.rl.algorithms.grpo import TokenLossGRPO


class SAPO(TokenLossGRPO):
    """The surrogate of softly gated ratios, with GRPO's advantages."""

    config: SAPOConfig

    def token_losses(
        self, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, None]:
        """Return -A f(ratio)."""
        positive, negative = self.config.gate_temperatures
        tau = torch.where(advantages > 0, positive, negative)
        gated = torch.sigmoid(tau * (bounded_ratio(log_ratio, mask=mask) - 1)) * 4 / tau
        return -advantages * gated, None
