"""Scores brought to mean 0 and deviation 1, so that kl_coef and score_clip mean the same for any reward.

Source: running statistics, OpenRLHF; those of the first actor's answers, Ziegler et al. 2019 (arXiv 1909.08593,
section 2.2) and InstructGPT, section 3.5, whose reward has mean 0 on demonstrations.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


class ScoreScaling:
    """Holds the statistics; the same on every rank, because scores are."""

    def __init__(self, how: Literal["none", "running", "initial"]) -> None:
        self._how = how
        self._count, self._mean, self._squares = 0.0, 0.0, 0.0

    @property
    def needs_first_answers(self) -> bool:
        """Whether `observe` must see the first actor's scores before any are scaled."""
        return self._how == "initial" and self._count == 0

    def observe(self, scores: Tensor) -> None:
        """Add scores [N] to the statistics (Chan et al.'s parallel variance)."""
        values = scores.double()
        count, mean = len(values), float(values.mean())
        squares = float((values - mean).square().sum())
        shift, total = mean - self._mean, self._count + count
        self._mean += shift * count / total
        self._squares += squares + shift**2 * self._count * count / total
        self._count = total

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores [N] scaled; running statistics take them in first."""
        if self._how == "none":
            return scores
        if self._how == "running":
            self.observe(scores)
        return self.scaled(scores)

    def scaled(self, scores: Tensor) -> Tensor:
        """Scores [N] scaled by the statistics so far."""
        if self._how == "none":
            return scores
        centred = scores - self._mean
        return centred / self._deviation if self._deviation else centred

    def scaled_std(self, scores: Tensor) -> float:
        """Standard deviation of scores [N] after scaling: about 1 where they are scaled; 0 for none."""
        if self._how != "none":
            return 1.0
        return float(scores.std(correction=0)) if len(scores) else 0.0

    def share(self, parts: Tensor) -> Tensor:
        """Parts of scores, divided as these are."""
        return parts if self._how == "none" or not self._deviation else parts / self._deviation

    def metrics(self) -> dict[str, float]:
        """What scores are scaled by; {} where they are not."""
        if self._how == "none":
            return {}
        return {"objective/scaling_mean": self._mean, "objective/scaling_std": self._deviation}

    @property
    def _deviation(self) -> float:
        return float(torch.tensor(self._squares / max(self._count - 1, 1)).sqrt())

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self._count, self._mean, self._squares = state["count"], state["mean"], state["squares"]
