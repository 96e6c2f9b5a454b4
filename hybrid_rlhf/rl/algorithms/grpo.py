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
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.configs.sections.algorithm import GroupConfig
from hybrid_rlhf.functional.advantages import group_mean, group_std
from hybrid_rlhf.functional.masking import row_sums
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm, groups_of, per_token
from hybrid_rlhf.rl.types import Rollout

EPSILON = 1e-4
"""The value of TRL."""


def standardized(values: Tensor, *, groups: Tensor) -> Tensor:
    """Values [N] less their group's mean, divided by the group's standard deviation."""
    return (values - group_mean(values, groups=groups)) / (group_std(values, groups=groups) + EPSILON)


class GRPO(Algorithm):
    """Outcomes standardized within the group of completions of one prompt."""

    config: GroupConfig

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return outcomes less their group's mean, divided by the group's standard deviation if configured, [N, T]."""
        outcomes = row_sums(rewards)
        groups = groups_of(rollout)
        if self.config.divide_by_std:
            return per_token(standardized(outcomes, groups=groups), rollout)
        return per_token(outcomes - group_mean(outcomes, groups=groups), rollout)


class DAPO(GRPO):
    """GRPO with clip-higher, dynamic sampling, a token-level loss and an overlong penalty."""


class DrGRPO(GRPO):
    """GRPO without the divisions that favour some prompts and some lengths."""
