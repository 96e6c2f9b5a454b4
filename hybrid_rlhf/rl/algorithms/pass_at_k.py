"""Pass@k training: a group's reward is the mean, over its subsets of k completions, of the best outcome in a subset.

Source: Chen et al. 2025 (arXiv 2508.10751), the analytical derivation of the advantage. With subsets S of a group,

    R(S) = max of the outcomes in S,  A_i = (mean of R(S) with i in S - mean of R(S)) / (std of R(S) + 1e-4)

For outcomes 0 and 1 this is the paper's formula, where a completion that fails gets the more, the fewer of the others
succeed. Deviation: outcomes of any value, for which the best one counts (max@k). In a group of k completions or fewer,
which has one subset, all advantages are 0.

Shapes: N completions, n of a group.
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import PassAtKConfig
from hybrid_rlhf.functional.masking import row_sums
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm, per_token
from hybrid_rlhf.rl.algorithms.grpo import EPSILON
from hybrid_rlhf.rl.types import Rollout


class PassAtK(Algorithm):
    """The best outcome of k completions, compared between the subsets with and without a completion."""

    config: PassAtKConfig

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the advantage of each completion at its tokens, [N, T]."""
        outcomes = row_sums(rewards).double()
        groups = rollout.groups
        advantages = torch.zeros_like(outcomes)
        for group in groups.unique():
            members = (groups == group).nonzero().flatten()
            if len(members) > self.config.k:
                advantages[members] = self._of_group(outcomes[members])
        return per_token(advantages.to(rewards.dtype), rollout)

    def _of_group(self, outcomes: Tensor) -> Tensor:
        """Advantages [n] of a group's completions."""
        k = self.config.k
        n = len(outcomes)
        order = outcomes.argsort(stable=True)
        best = outcomes[order] - outcomes.min()  # equal outcomes give exactly 0
        # in ascending order, of all subsets those whose best is at a place, and of the subsets with a given completion
        # those whose best is at a later place or is that completion
        of_all = torch.tensor([comb(place, k - 1) / comb(n, k) for place in range(n)], dtype=best.dtype)
        with_one = comb(n - 1, k - 1)
        later = [comb(place - 1, k - 2) / with_one if k > 1 and place > 0 else 0.0 for place in range(n)]
        itself = torch.tensor([comb(place, k - 1) / with_one for place in range(n)], dtype=best.dtype)
        at_later = torch.tensor(later, dtype=best.dtype) * best
        mean = (of_all * best).sum()
        advantages = itself * best + at_later.flip(0).cumsum(0).flip(0) - at_later - mean
        if self.config.divide_by_std:
            advantages = advantages / ((of_all * (best - mean).square()).sum().sqrt() + EPSILON)
        return torch.empty_like(advantages).scatter(0, order, advantages)
