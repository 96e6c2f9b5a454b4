"""REINFORCE: a completion is one action, its baseline the mean of all outcomes before.

Source: Williams 1992; the moving average of Ahmadian et al. 2024 (arXiv 2402.14740), eq. 4 and 5.

    A = R - b,  b = mean of R over all completions of earlier rollouts

Deviations: the first rollout, before which there is none, takes its own mean. R includes the KL penalty where that is
in the reward. The loss is PPO's clipped surrogate, whose gradient is REINFORCE's in the first update from a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_rlhf.algorithms.on_policy.algorithm import Estimate, Judged, OnPolicyAlgorithm
from hybrid_rlhf.configs.on_policy import AlgorithmConfig


class Reinforce(OnPolicyAlgorithm):
    """Outcomes less their moving average."""

    def __init__(self, config: AlgorithmConfig, *, value_lam: float = 1.0) -> None:
        super().__init__(config, value_lam=value_lam)
        self._count, self._sum = 0, 0.0

    def estimate(self, judged: Judged) -> Estimate:
        """See OnPolicyAlgorithm."""
        outcomes = judged.outcomes
        baseline = self._sum / self._count if self._count else float(outcomes.mean())
        self._count, self._sum = self._count + len(outcomes), self._sum + float(outcomes.sum())
        return Estimate(judged.spread(outcomes - baseline))

    def state_dict(self) -> dict[str, Any]:
        """See OnPolicyAlgorithm."""
        return {"count": self._count, "sum": self._sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See OnPolicyAlgorithm."""
        self._count, self._sum = state["count"], state["sum"]
