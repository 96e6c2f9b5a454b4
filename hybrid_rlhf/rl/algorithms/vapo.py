"""VAPO: PPO for long reasoning, with a lambda of the actor that grows with the length of a completion.

Source: Yue et al. 2025 (arXiv 2504.05118), section 4.

    lambda_i = 1 - 1 / (alpha |o_i|),  loss = PPO's, a mean over tokens + mu * mean over positive tokens of -log p

The critic learns from what was earned (critic.gae_lambda 1) and alone at first (critic.warmup_steps): the paper's value
pretraining. Positive are the tokens of completions whose score is above 0. Deviation: a lambda below 0, of fewer than
1 / alpha tokens, is 0.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.configs.algorithms import VAPOConfig
from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.rl.algorithms.ppo import PPO
from hybrid_rlhf.rl.types import Rollout


class VAPO(PPO):
    """PPO with length-adaptive generalized advantage estimation."""

    config: VAPOConfig

    def actor_lambda(self, rollout: Rollout) -> Tensor:
        """Return the lambda of each completion, [N]."""
        lengths = rollout.response_mask.sum(dim=1)
        return (1 - 1 / (self.config.length_alpha * lengths)).clamp(min=0)

    def extra_tokens(self, rollout: Rollout) -> Tensor | None:
        """Return the positive tokens, [N, T] bool."""
        if not self.config.positive_coef:
            return None
        assert rollout.scores is not None
        return rollout.response_mask & (rollout.scores > 0)[:, None]

    def extra_loss(
        self, logprobs: Tensor, rollout: Rollout, *, weights: Tensor | None, tokens: float, counted: float
    ) -> Tensor:
        """Return the negative log-likelihood of the positive tokens, times positive_coef."""
        mask = self.extra_tokens(rollout)
        assert mask is not None
        kept = logprobs if weights is None else weights * logprobs
        return -self.config.positive_coef * tokens / counted * masked_sum(kept, mask=mask)
