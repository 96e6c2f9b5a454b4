"""GRPO: outcomes relative to the prompt's group, in units of the group's deviation.

Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1, eq. 3 and 4.

    A_i = (R_i - mean(R)) / (std(R) + 1e-4),  loss = 1/G sum_i 1/|o_i| sum_t (clipped surrogate + kl_coef * k3)

The deviation can be left out (ppo.group_deviation), the KL moved to the reward (ppo.kl_in), and the mean over a
completion's tokens exchanged for another (ppo.loss_normalisation).
"""

from __future__ import annotations

from hybrid_rlhf.algorithms.on_policy.algorithm import Estimate, Judged, OnPolicyAlgorithm
from hybrid_rlhf.functional.groups import group_deviation, group_mean

_EPSILON = 1e-4
"""TRL's; a group of equal outcomes has advantages of 0 in any case."""


class GRPO(OnPolicyAlgorithm):
    """Outcomes standardised in their group."""

    def estimate(self, judged: Judged) -> Estimate:
        """See OnPolicyAlgorithm."""
        outcomes, groups = judged.outcomes, judged.groups
        advantages = outcomes - group_mean(outcomes, groups=groups)
        if self.config.group_deviation:
            advantages = advantages / (group_deviation(outcomes, groups=groups) + _EPSILON)
        return Estimate(judged.spread(advantages))
