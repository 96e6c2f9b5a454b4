"""PPO: a critic's values are the baseline of every token.

Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with GAE (arXiv 1506.02438), eq. 16, as InstructGPT uses them
(arXiv 2203.02155, section 3.5).

    A_t = sum_l (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}),  returns_t = A'_t + V_t
    loss_t = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)

A' has a lambda of its own, critic.gae_lambda (decoupled GAE of VC-PPO, arXiv 2503.01491): with 1 the critic learns
from the observed rewards alone, whatever the bias of its first values, while the actor may trade bias for variance.
Deviations: advantages are whitened over the rollout (N details, no. 18); two bounds of the clip.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hybrid_rlhf.configs.algorithms import ActorCriticConfig, PPOConfig
from hybrid_rlhf.functional.advantages import gae
from hybrid_rlhf.functional.masking import masked_whiten
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm
from hybrid_rlhf.rl.types import Rollout


class PPO(Algorithm):
    """Generalized advantage estimation with a critic, and the clipped surrogate."""

    config: ActorCriticConfig

    @property
    def value_clip(self) -> float:
        """See Algorithm."""
        return self.config.value_clip

    def shaped(self, rewards: Tensor, *, mask: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rewards with variance 1 over tokens, if algorithm.whiten_rewards is true."""
        if not self.config.whiten_rewards:
            return rewards
        unbiased = self.config.whiten_unbiased
        return masked_whiten(rewards, mask=mask, shift_mean=False, unbiased=unbiased, total=total)

    def actor_lambda(self, rollout: Rollout) -> float | Tensor:
        """Return the lambda of the actor's advantages, for all completions or [N]."""
        assert isinstance(self.config, PPOConfig)
        return self.config.gae_lambda

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the GAE advantages with the actor's lambda, [N, T]."""
        return self._gae(rewards, rollout, lam=self.actor_lambda(rollout))[0]

    def returns(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the critic's targets, by GAE with critic.gae_lambda, [N, T]."""
        return self._gae(rewards, rollout, lam=self.value_lam)[1]

    def _gae(self, rewards: Tensor, rollout: Rollout, *, lam: float | Tensor) -> tuple[Tensor, Tensor]:
        assert rollout.old_values is not None
        return gae(rewards, values=rollout.old_values, mask=rollout.response_mask, gamma=self.config.gamma, lam=lam)
