"""REINFORCE++: no baseline but the mean of the whole rollout; or a group's mean first.

Source: Hu et al. 2025 (arXiv 2501.03262), section 3: eq. 7 to 9, and the baseline form of section 3.2.

    A_t = whiten(sum_{s >= t} gamma^{s - t} r_s),  r with the KL penalty a token (k1)
    baseline form: r_i less the mean outcome of its prompt's completions first, the KL a term of the loss (k2)

Whitening, over all completions of the rollout and all ranks, is the loop's own (ppo.whiten_advantages).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hybrid_rlhf.algorithms.on_policy.algorithm import Estimate, Judged, OnPolicyAlgorithm
from hybrid_rlhf.functional.advantages import gae, shaped_rewards
from hybrid_rlhf.functional.groups import group_mean


class ReinforcePP(OnPolicyAlgorithm):
    """What is still to come."""

    def estimate(self, judged: Judged) -> Estimate:
        """See OnPolicyAlgorithm."""
        nothing = torch.zeros_like(judged.rewards)
        to_come, _ = gae(judged.rewards, values=nothing, mask=judged.mask, gamma=self.config.gamma, lam=1.0)
        return Estimate(to_come)


class ReinforcePPBaseline(ReinforcePP):
    """What is still to come, less the group's mean at the end."""

    def estimate(self, judged: Judged) -> Estimate:
        """See OnPolicyAlgorithm."""
        baseline = group_mean(judged.outcomes, groups=judged.groups)
        nothing = torch.zeros_like(judged.rewards)
        less = shaped_rewards(scores=-baseline, kl=nothing, mask=judged.mask, kl_coef=0.0)
        return super().estimate(replace(judged, rewards=judged.rewards + less))
