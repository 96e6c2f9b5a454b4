"""ReMax: the baseline of a completion is the score of its prompt's greedy completion.

Source: Li et al. 2023 (arXiv 2310.10505), algorithm 1.

    A_t = sum_{s >= t} r_s - r(x, greedy(x))

Deviations: the KL penalty, where it is in the reward, is part of r_s and not of the baseline. The loss is PPO's clipped
surrogate, whose gradient is REINFORCE's in the first update from a rollout.
"""

from __future__ import annotations

import torch

from hybrid_rlhf.algorithms.on_policy.algorithm import Estimate, Judged, OnPolicyAlgorithm
from hybrid_rlhf.functional.advantages import gae


class ReMax(OnPolicyAlgorithm):
    """What is still to come, less the greedy score."""

    wants_greedy = True

    def estimate(self, judged: Judged) -> Estimate:
        """See OnPolicyAlgorithm."""
        assert judged.greedy_scores is not None
        nothing = torch.zeros_like(judged.rewards)
        to_come, _ = gae(judged.rewards, values=nothing, mask=judged.mask, gamma=1.0, lam=1.0)
        return Estimate(to_come - judged.spread(judged.greedy_scores))
