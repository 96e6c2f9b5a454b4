"""RLOO: the baseline of a completion is the mean outcome of its prompt's other completions.

Source: Ahmadian et al. 2024 (arXiv 2402.14740), section 3.2; Kool et al. 2019.

    A_i = R_i - 1 / (k - 1) sum_{j != i} R_j

Deviations: R includes the KL penalty where that is in the reward, summed over the completion (the paper's, too). The
loss is PPO's clipped surrogate, whose gradient is REINFORCE's in the first update from a rollout.
"""

from __future__ import annotations

from hybrid_rlhf.algorithms.on_policy.algorithm import Estimate, Judged, OnPolicyAlgorithm
from hybrid_rlhf.functional.groups import leave_one_out


class RLOO(OnPolicyAlgorithm):
    """Outcomes less those of the siblings."""

    def estimate(self, judged: Judged) -> Estimate:
        """See OnPolicyAlgorithm."""
        return Estimate(judged.spread(leave_one_out(judged.outcomes, groups=judged.groups)))
