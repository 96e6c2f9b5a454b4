"""GDPO: each component of the reward is standardized within the group before the weighted sum.

Source: Liu et al. 2026 (arXiv 2601.05242). GRPO standardizes the sum, in which components with a large
spread hide the others, and groups whose components differ but whose sums are equal teach nothing.

    A_i = whitened over the rollout: sum_c w_c (R_ci - mean(R_c)) / (std(R_c) + 1e-4)

The training loop whitens (algorithm.whiten_advantages). Deviation: what is no component of the reward (penalties, a KL
in the reward, rewards of an environment) is added less its mean in the group; alone, it is standardized.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.configs.algorithms import GDPOConfig
from hybrid_rlhf.functional.advantages import group_mean, group_std
from hybrid_rlhf.functional.masking import row_sums
from hybrid_rlhf.rl.algorithms.algorithm import groups_of, per_token
from hybrid_rlhf.rl.algorithms.grpo import EPSILON, GRPO
from hybrid_rlhf.rl.batch import Rollout


class GDPO(GRPO):
    """Components of the reward standardized within the group, then summed."""

    config: GDPOConfig

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the weighted sum of the standardized components, [N, T]."""
        groups = groups_of(rollout)
        outcomes = row_sums(rewards)
        if not self.component_weights:
            return per_token(_standardized(outcomes, groups), rollout)
        # a component without a score counts 0, as in the sum
        components = {name: rollout.components[name].nan_to_num(0.0) for name in self.component_weights}
        rest = outcomes - sum(weight * components[name] for name, weight in self.component_weights.items())
        advantages = rest - group_mean(rest, groups=groups)
        for name, weight in self.component_weights.items():
            advantages = advantages + weight * _standardized(components[name], groups)
        return per_token(advantages, rollout)


def _standardized(scores: Tensor, groups: Tensor) -> Tensor:
    return (scores - group_mean(scores, groups=groups)) / (group_std(scores, groups=groups) + EPSILON)
