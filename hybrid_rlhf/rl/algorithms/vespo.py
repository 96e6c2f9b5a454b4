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
from hybrid_rlhf.functional.losses import MAX_LOG_RATIO, LossSum, policy_sum
from hybrid_rlhf.functional.masking import keep, row_sums
from hybrid_rlhf.rl.algorithms.algorithm import log_ratios
from hybrid_rlhf.rl.algorithms.grpo import GRPO
from hybrid_rlhf.rl.types import Batch


class VESPO(GRPO):
    """REINFORCE's gradient weighted by a gate of sequence ratios, with GRPO's advantages."""

    config: VESPOConfig

    def loss(self, logprobs: Tensor, batch: Batch, *, weights: Tensor, tokens_per_completion: float) -> LossSum:
        """Return -sg(phi(ratio)) A log p, summed over the tokens of a micro-batch."""
        mask = batch.rollout.response_mask
        advantages = keep(batch.advantages, mask)
        log_ratio = log_ratios(logprobs.detach(), batch.rollout)
        of_sequence = row_sums(log_ratio)[:, None].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        power, decay = (
            torch.where(advantages >= 0, positive, negative)
            for positive, negative in (self.config.gate_power, self.config.gate_decay)
        )
        gate = (power * of_sequence + decay * (1 - of_sequence.exp())).exp()
        loss = -gate * advantages * keep(logprobs, mask)
        return policy_sum(loss, log_ratio=log_ratio, mask=mask, weights=weights)
