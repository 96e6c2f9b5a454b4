"""REINFORCE++: the baseline is the mean of the whole rollout alone, or a group's mean before it.

Source: Hu et al. 2025 (arXiv 2501.03262), section 3: eq. 7 to 9, and the baseline form of section 3.2.

    A_t = whiten(sum_{s >= t} gamma^{s - t} r_s),  r with the KL penalty a token (k1)
    baseline form: r_i less the mean outcome of its prompt's completions first, the KL a term of the loss (k2)

The training loop whitens, over all completions of the rollout and all ranks (algorithm.whiten_advantages).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import ReinforcePPConfig
from hybrid_rlhf.functional.advantages import gae, group_mean, shaped_rewards
from hybrid_rlhf.functional.masking import row_sums
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm
from hybrid_rlhf.rl.types import Rollout


class ReinforcePP(Algorithm):
    """The reward to go."""

    config: ReinforcePPConfig

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the discounted reward to go of each token, [N, T]."""
        reward_to_go, _ = gae(
            rewards, values=torch.zeros_like(rewards), mask=rollout.response_mask, gamma=self.config.gamma, lam=1.0
        )
        return reward_to_go


class ReinforcePPBaseline(ReinforcePP):
    """The reward to go, less the group's mean at the last token."""

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the reward to go after subtracting the group's mean outcome at the last token, [N, T]."""
        baseline = group_mean(row_sums(rewards), groups=rollout.groups)
        less = shaped_rewards(scores=-baseline, kl=torch.zeros_like(rewards), mask=rollout.response_mask, kl_coef=0.0)
        return super().advantages(rewards + less, rollout)
