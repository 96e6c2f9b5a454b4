"""GRPO, and DAPO and Dr. GRPO, which are GRPO with other defaults (hybrid_rlhf/configs/algorithms.py).

Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1, eq. 3 and 4.

    A_i = (R_i - mean(R)) / (std(R) + 1e-4),  loss = 1/G sum_i 1/|o_i| sum_t (clipped surrogate + kl_coef * k3)

The standard deviation can be left out (algorithm.divide_by_std), the KL moved to the reward (algorithm.kl.where), and
the mean over a completion's tokens replaced by another (algorithm.loss_normalization).

DAPO: Yu et al. 2025 (arXiv 2503.14476), eq. 8 and 10 (clip-higher), eq. 11 (dynamic sampling), eq. 12 (mean over
tokens), eq. 13 (overlong shaping), section 3.4 (overlong filtering). Deviation: dynamic sampling requests as many
prompts as are missing and learns from every accepted group; the paper oversamples and discards the surplus.

Dr. GRPO: Liu et al. 2025 (arXiv 2503.20783), section 3.2: no division by the group's standard deviation and none by
the completion's length, no KL.

    A_i = R_i - mean(R),  loss = 1/G sum_i 1/max_new_tokens sum_t (clipped surrogate)

MaxRL: Tajwar et al. 2026 (arXiv 2602.02710), as an option (algorithm.divide_by_mean): the gradient of a truncated
log-likelihood of success, in place of the gradient of the success rate.

    A_i = (R_i - mean(R)) / (mean(R) + 1e-4) where mean(R) > 0, else 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.algorithm import GroupConfig
from hybrid_rlhf.functional.advantages import group_mean, group_std
from hybrid_rlhf.functional.losses import LossSum, policy_sum
from hybrid_rlhf.functional.masking import keep, row_sums
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm, log_ratios, per_token
from hybrid_rlhf.rl.types import Batch, Rollout

EPSILON = 1e-4
"""The value of TRL."""


def standardized(values: Tensor, *, groups: Tensor) -> Tensor:
    """Values [N] less their group's mean, divided by the group's standard deviation."""
    return (values - group_mean(values, groups=groups)) / (group_std(values, groups=groups) + EPSILON)


class GRPO(Algorithm):
    """Outcomes standardized within the group of completions of one prompt."""

    config: GroupConfig

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return outcomes less their group's mean, divided by the group's standard deviation or mean if configured,
        [N, T]."""
        outcomes = row_sums(rewards)
        groups = rollout.groups
        if self.config.divide_by_mean:
            mean = group_mean(outcomes, groups=groups)
            return per_token(torch.where(mean > 0, (outcomes - mean) / (mean + EPSILON), 0.0), rollout)
        if self.config.divide_by_std:
            return per_token(standardized(outcomes, groups=groups), rollout)
        return per_token(outcomes - group_mean(outcomes, groups=groups), rollout)


class TokenLossGRPO(GRPO):
    """GRPO with another loss of each token than the clipped surrogate."""

    def loss(self, logprobs: Tensor, batch: Batch, *, weights: Tensor, tokens_per_completion: float) -> LossSum:
        """Return the losses of the tokens of a micro-batch, summed."""
        mask = batch.rollout.response_mask
        logprobs = keep(logprobs, mask)
        log_ratio = log_ratios(logprobs, batch.rollout)
        losses, clipped = self.token_losses(logprobs, log_ratio, keep(batch.advantages, mask), mask)
        return policy_sum(losses, log_ratio=log_ratio, mask=mask, clipped=clipped, weights=weights)

    def token_losses(
        self, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each token [B, T], and where it is clipped; None: nowhere.

        Args:
            logprobs: [B, T] of the current actor, with gradient; 0 outside of the mask, as the next two.
            log_ratio: [B, T] to the actor that sampled, with gradient.
            advantages: [B, T].
            mask: [B, T], true on response tokens.
        """
        raise NotImplementedError


class DAPO(GRPO):
    """GRPO with clip-higher, dynamic sampling, a token-level loss and an overlong penalty."""


class DrGRPO(GRPO):
    """GRPO without the divisions that favour some prompts and some lengths."""
