"""REINFORCE: a completion is one action; its baseline is the mean of all earlier outcomes.

Source: Williams 1992; the moving average of Ahmadian et al. 2024 (arXiv 2402.14740), eq. 4 and 5.

    A = R - b,  b = mean of R over all completions of earlier rollouts, those of other ranks included

Deviations: the baseline of the first rollout is its own mean. R includes the KL penalty where that is
in the reward. The loss is PPO's clipped surrogate, whose gradient is REINFORCE's in the first update from a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.algorithm import AlgorithmConfig
from hybrid_rlhf.functional.masking import row_sums
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm, per_token
from hybrid_rlhf.rl.types import Rollout


class Reinforce(Algorithm):
    """Outcomes less their moving average."""

    def __init__(self, config: AlgorithmConfig, *, value_lam: float = 1.0) -> None:
        super().__init__(config, value_lam=value_lam)
        self._count = 0
        self._sum = 0.0

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return outcomes less the mean outcome of all earlier rollouts, at every response token, [N, T]. Every rank
        calls."""
        outcomes = row_sums(rewards)
        count, summed = rollout.total(torch.stack([torch.tensor(len(outcomes)), outcomes.sum(dtype=torch.float64)]))
        baseline = self._sum / self._count if self._count else float(summed / count)
        self._count += int(count)
        self._sum += float(summed)
        return per_token(outcomes - baseline, rollout)

    def state_dict(self) -> dict[str, Any]:
        """Return the number and the sum of all outcomes so far."""
        return {"count": self._count, "sum": self._sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number and the sum of outcomes."""
        self._count = state["count"]
        self._sum = state["sum"]
