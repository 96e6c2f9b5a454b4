"""SAPO: a sigmoid of the ratio in place of a clip, so that the gradient fades instead of ending.

Source: Gao et al. 2025 (arXiv 2511.20347); TRL's loss_type sapo.

    loss_t = -A f(r_t),  f(r) = 4 / tau * sigmoid(tau (r - 1)),  tau larger for A <= 0

The slope of f is 1 at r = 1, where the gradient is that of the plain surrogate. Advantages are GRPO's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import SAPOConfig
from hybrid_rlhf.functional.losses import LossSum, bounded_ratio, policy_sum
from hybrid_rlhf.functional.masking import keep
from hybrid_rlhf.rl.algorithms.algorithm import log_ratios
from hybrid_rlhf.rl.algorithms.grpo import GRPO
from hybrid_rlhf.rl.types import Batch


class SAPO(GRPO):
    """The surrogate of softly gated ratios, with GRPO's advantages."""

    config: SAPOConfig

    def loss(self, logprobs: Tensor, batch: Batch, *, weights: Tensor, tokens_per_completion: float) -> LossSum:
        """Return -A f(ratio), summed over the tokens of a micro-batch."""
        mask = batch.rollout.response_mask
        advantages = keep(batch.advantages, mask)
        log_ratio = log_ratios(logprobs, batch.rollout)
        positive, negative = self.config.gate_temperatures
        tau = torch.where(advantages > 0, positive, negative)
        gated = torch.sigmoid(tau * (bounded_ratio(log_ratio, mask=mask) - 1)) * 4 / tau
        return policy_sum(-advantages * gated, log_ratio=log_ratio, mask=mask, weights=weights)
