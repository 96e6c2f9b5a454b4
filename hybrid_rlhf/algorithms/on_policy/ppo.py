"""PPO: a critic's values are the baseline of every token.

Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with GAE (arXiv 1506.02438), eq. 16, as InstructGPT uses them
(arXiv 2203.02155, section 3.5).

    A_t = sum_l (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}),  returns_t = A'_t + V_t
    loss_t = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)

A' has a lambda of its own, critic.lam (decoupled GAE of VC-PPO, arXiv 2503.01491): with 1 the critic learns
from what was earned alone, whatever the bias of its first values, while the actor may trade that bias for variance.
Deviations: advantages are whitened over the rollout (N details, no. 18); two bounds of the clip.
"""

from __future__ import annotations

from functools import partial

from hybrid_rlhf.algorithms.on_policy.algorithm import Estimate, Judged, OnPolicyAlgorithm
from hybrid_rlhf.functional.advantages import gae


class PPO(OnPolicyAlgorithm):
    """Generalised advantages and the clipped surrogate."""

    def estimate(self, judged: Judged) -> Estimate:
        """See OnPolicyAlgorithm."""
        assert judged.values is not None
        both = partial(gae, judged.rewards, values=judged.values, mask=judged.mask, gamma=self.config.gamma)
        advantages, _ = both(lam=self.config.lam)
        _, returns = both(lam=self.value_lam)
        return Estimate(advantages, returns)
