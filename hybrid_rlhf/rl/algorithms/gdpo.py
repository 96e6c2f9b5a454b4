"""GDPO: each component of the reward is standardized within the group before the weighted sum.

Source: Liu et al. 2026 (arXiv 2601.05242). GRPO standardizes the sum, in which components with a large
spread hide the others, and groups whose components differ but whose sums are equal teach nothing.

    A_i = whitened over the completions of the rollout: sum_c w_c (R_ci - mean(R_c)) / (std(R_c) + 1e-4)

The training loop whitens (algorithm.whiten_advantages). A completion to which a component does not apply is not part of
the component's mean and standard deviation, and has no advantage from it, as in TRL (grpo_trainer.py). Deviation: what
is no component of the reward (penalties, a KL in the reward, rewards of an environment) is added less its mean in the
group; alone, it is standardized.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import GDPOConfig
from hybrid_rlhf.functional.advantages import group_mean
from hybrid_rlhf.functional.masking import row_sums
from hybrid_rlhf.rl.algorithms.algorithm import per_token
from hybrid_rlhf.rl.algorithms.grpo import GRPO, standardized
from hybrid_rlhf.rl.types import Rollout


class GDPO(GRPO):
    """Components of the reward standardized within the group, then summed."""

    config: GDPOConfig

    whitens_completions = True

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the weighted sum of the standardized components, [N, T]."""
        if not self.component_weights:
            return super().advantages(rewards, rollout)
        groups = rollout.groups
        rest = row_sums(rewards)
        advantages = torch.zeros_like(rest)
        for name, weight in self.component_weights.items():
            scores = rollout.components[name]
            applies = ~scores.isnan()
            compared = torch.zeros_like(rest)
            compared[applies] = standardized(scores[applies], groups=groups[applies])
            rest = rest - weight * scores.nan_to_num(0.0)  # what it has added to the score
            advantages = advantages + weight * compared
        return per_token(advantages + rest - group_mean(rest, groups=groups), rollout)
