"""ReMax: the baseline of a completion is the score of its prompt's greedy completion.

Source: Li et al. 2023 (arXiv 2310.10505), algorithm 1.

    A_t = sum_{s >= t} r_s - r(x, greedy(x))

Deviations: the KL penalty, where it is in the reward, is part of r_s and not of the baseline. The loss is PPO's clipped
surrogate, whose gradient is REINFORCE's in the first update from a rollout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.functional.advantages import gae
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm, per_token
from hybrid_rlhf.rl.types import Rollout


class ReMax(Algorithm):
    """The reward to go, less the score of the greedy completion."""

    wants_greedy = True

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the reward to go less the score of the prompt's greedy completion, [N, T]."""
        assert rollout.greedy_scores is not None
        reward_to_go, _ = gae(rewards, values=torch.zeros_like(rewards), mask=rollout.response_mask, gamma=1.0, lam=1.0)
        return reward_to_go - per_token(rollout.greedy_scores, rollout)
