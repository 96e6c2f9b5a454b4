"""Scores scaled to mean 0 and standard deviation 1, so that kl_coef and score_clip mean the same for any reward.

Sources: running statistics, OpenRLHF; statistics of the initial actor's completions, Ziegler et al. 2019 (arXiv
1909.08593, section 2.2) and InstructGPT (arXiv 2203.02155, section 3.5), whose reward has mean 0 on demonstrations.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybrid_rlhf.functional.masking import spread


class ScoreScaling:
    """Scales scores by their statistics, which are the same on every rank because scores are."""

    def __init__(self, how: Literal["none", "running", "initial"]) -> None:
        self._how = how
        self._count, self._mean, self._squares = 0.0, 0.0, 0.0

    @property
    def needs_initial_scores(self) -> bool:
        """Whether `observe` must be called with scores of the initial actor before any scores are scaled."""
        return self._how == "initial" and self._count == 0

    def observe(self, scores: Tensor) -> None:
        """Add scores [N] to the statistics (Chan et al.'s parallel variance)."""
        values = scores.double()
        low = values.min()
        count, mean = len(values), float(low + (values - low).mean())  # equal scores have a deviation of exactly 0
        squares = float((values - mean).square().sum())
        shift, total = mean - self._mean, self._count + count
        self._mean += shift * (count / total)
        self._squares += squares + shift**2 * self._count * count / total
        self._count = total

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores [N] scaled; running statistics are updated with them first."""
        if self._how == "none":
            return scores
        if self._how == "running":
            self.observe(scores)
        return self.scaled(scores)

    def scaled(self, scores: Tensor) -> Tensor:
        """Scores [N] scaled by the current statistics."""
        if self._how == "none":
            return scores
        centered = scores - self._mean
        return centered / self._std if self._std else centered

    def scaled_std(self, scores: Tensor) -> float:
        """Standard deviation of scores [N] after scaling: 1 with scaling; 0 without scores."""
        if self._how != "none":
            return 1.0
        return spread(scores) if len(scores) else 0.0

    def scale_rewards(self, rewards: Tensor) -> Tensor:
        """Rewards of turns, divided by the standard deviation of the scores."""
        return rewards if self._how == "none" or not self._std else rewards / self._std

    def metrics(self) -> dict[str, float]:
        """Mean and standard deviation of the scaling; {} without scaling."""
        if self._how == "none":
            return {}
        return {"objective/scaling_mean": self._mean, "objective/scaling_std": self._std}

    @property
    def _std(self) -> float:
        return float(torch.tensor(self._squares / max(self._count - 1, 1)).sqrt())

    def state_dict(self) -> dict[str, float]:
        """The statistics, for a checkpoint."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self._count, self._mean, self._squares = state["count"], state["mean"], state["squares"]
