"""RLOO: the baseline of a completion is the mean outcome of its prompt's other completions.

Source: Ahmadian et al. 2024 (arXiv 2402.14740), section 3.2; Kool et al. 2019.

    A_i = R_i - 1 / (k - 1) sum_{j != i} R_j

Deviations: R includes the KL penalty where that is in the reward, summed over the completion (the paper's, too). The
loss is PPO's clipped surrogate, whose gradient is REINFORCE's in the first update from a rollout.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.functional.advantages import leave_one_out
from hybrid_rlhf.functional.masking import row_sums
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm, per_token
from hybrid_rlhf.rl.types import Rollout


class RLOO(Algorithm):
    """Outcomes less the mean outcome of the other completions of the prompt."""

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return outcomes less the leave-one-out mean of their group, at every response token, [N, T]."""
        return per_token(leave_one_out(row_sums(rewards), groups=rollout.groups), rollout)
