"""VESPO: REINFORCE weighted by a smooth function of the ratio of the whole sequence, without a clip.

Source: arXiv 2602.10693 (2026); TRL's loss_type vespo.

    loss_t = -sg(phi(w_i)) A_i log p_t,  w_i = p(y_i) / p_old(y_i),  phi(w) = w^k exp(lambda (1 - w))

phi(1) is 1; its maximum is at w = k / lambda, below which it falls to 0 as a power and above as an exponential. k and
lambda differ by the sign of the advantage. Advantages are GRPO's. Deviation: the ratio to the sampler, if it differs
from p_old, is a factor of the loss (algorithm.correction) and not of w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import VESPOConfig
from hybrid_rlhf.functional.losses import MAX_LOG_RATIO
from hybrid_rlhf.functional.masking import row_sums
from hybrid_rlhf.rl.algorithms.grpo import TokenLossGRPO


class VESPO(TokenLossGRPO):
    """REINFORCE's gradient weighted by a gate of sequence ratios, with GRPO's advantages."""

    config: VESPOConfig

    def token_losses(
        self, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, None]:
        """Return -sg(phi(ratio)) A log p."""
        of_sequence = row_sums(log_ratio.detach())[:, None].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        power, decay = (
            torch.where(advantages >= 0, positive, negative)
            for positive, negative in (self.config.gate_power, self.config.gate_decay)
        )
        gate = (power * of_sequence + decay * (1 - of_sequence.exp())).exp()
        return -gate * advantages * logprobs, None
