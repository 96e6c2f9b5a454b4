"""KTO: completions labelled good or bad, each compared with a reference point instead of another completion.

Source: Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 8, and section 4.1 on the estimate of the KL.

    r = log p(y) / ref(y),  z = max(0, mean over the batch of log p(y') / ref(y') on mismatched prompts)
    loss = desirable_weight (1 - sigmoid(beta (r - z)))    of a good completion
           undesirable_weight (1 - sigmoid(beta (z - r)))  of a bad one

Deviation: the mismatched completions of a row are those of the next row with another prompt, as many as the row has. z
is a mean over the whole update, without gradient, so it does not depend on ranks or micro-batches. The paper shifts
completions within a micro-batch, TRL within a stored chunk of the data.

Shapes: R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.configs.preference import KTOConfig
from hybrid_rlhf.functional.losses import LossSum


class KTO:
    """Sigmoid value function around the reference point."""

    def __init__(self, config: KTOConfig) -> None:
        self.config = config

    def __call__(self, log_ratio: Tensor, *, mean_logprobs: Tensor, good: Tensor, reference_point: Tensor) -> LossSum:
        """The loss summed over rows; good rows add algorithm.sft_coef times their negative log-likelihood per token.

        Args:
            log_ratio: [R] log-ratio of actor to reference, with gradient.
            mean_logprobs: [R] mean log-prob per token, with gradient.
            good: [R] bool, labels.
            reference_point: scalar, the z above, without gradient.
        """
        config = self.config
        sign = torch.where(good, 1.0, -1.0)
        weight = torch.where(good, config.desirable_weight, config.undesirable_weight)
        losses = weight * (1 - torch.sigmoid(config.beta * sign * (log_ratio - reference_point)))
        if config.sft_coef:
            losses = losses - config.sft_coef * torch.where(good, mean_logprobs, 0.0)
        rewards = config.beta * log_ratio.detach()
        stats = {
            "accuracy": ((log_ratio.detach() > reference_point) == good).float().sum(),
            "good_reward": torch.where(good, rewards, 0.0).sum(),
            "bad_reward": torch.where(good, 0.0, rewards).sum(),
            "good": good.float().sum(),
            "kl": reference_point.detach() * len(losses),
        }
        return LossSum(losses.sum(), torch.full_like(losses, 1.0).sum().detach(), stats)
