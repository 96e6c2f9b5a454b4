"""Reward models from pairs and ranked lists: one score per completion, at its last token.

Source: Ouyang et al. 2022 (arXiv 2203.02155), eq. 1. All completions of a prompt are in one micro-batch, each once.
With several heads a row trains one of them. Training from labels is in reward_labels.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hybrid_rlhf.configs.reward import RewardObjectiveConfig
from hybrid_rlhf.data.collation import PreferenceBatch, RewardLabelBatch, collate_preferences
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.losses import LossSum, pairwise_reward_loss
from hybrid_rlhf.functional.reward_losses import listwise_reward_loss
from hybrid_rlhf.models.policy import of_heads, scores_at_end
from hybrid_rlhf.supervised.trainer import Objective

ScoredT = TypeVar("ScoredT", PreferenceBatch, RewardLabelBatch)


class CalibrationData(NamedTuple):
    """Scores of a model, for its calibration."""

    margins: Tensor
    """[E] score difference of each comparison, or signed score of each label; positive if correct."""
    margin_heads: Tensor
    """[E] int64, head of each margin."""
    scores: Tensor
    """[N] scores of completions, or of their steps."""
    score_heads: Tensor
    """[N] int64, head of each score."""


class ScoreObjective(Objective[ScoredT]):
    """Base of the objectives of reward models."""

    name = "reward"

    def __init__(self, config: RewardObjectiveConfig, **settings: Any) -> None:
        """Take the section, and the settings of `Objective`."""
        super().__init__(**settings)
        self._config = config

    @abstractmethod
    def calibration_data(self, engine: ModelEngine, batch: ScoredT) -> CalibrationData:
        """Scores and margins of a batch."""

    def outputs(self, engine: ModelEngine, batch: ScoredT) -> tuple[Tensor, ScoredT]:
        """[N, T] scores after each token, of the head that each completion trains; and the batch for a loss."""
        outputs = engine(batch.input_ids, batch.attention_mask, images=batch.images)
        batch = batch.for_loss(self._device)
        return of_heads(outputs, batch.head), batch

    def with_head_counts(self, loss: LossSum, correct: Tensor, heads: Tensor) -> LossSum:
        """A loss with the number of comparisons or labels in its stats, and per head the number that are correct.

        Args:
            loss: a loss whose stats are sums over comparisons or labels.
            correct: [E] bool, true where the model agrees with the comparison or label.
            heads: [E] int64, head of each comparison or label.
        """
        stats = {**loss.stats, "compared": torch.full_like(correct, 1.0, dtype=torch.float32).sum()}
        for place, name in enumerate(self._config.heads):
            stats[f"correct_{name}"] = (correct & (heads == place)).float().sum()
            stats[f"compared_{name}"] = (heads == place).float().sum()
        return replace(loss, stats=stats)

    def head_accuracies(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """Accuracy of each head that has comparisons or labels."""
        return {
            f"{prefix}/accuracy_{name}": means[f"correct_{name}"] / means[f"compared_{name}"]
            for name in self._config.heads
            if means[f"compared_{name}"]
        }


class RewardPairObjective(ScoreObjective[PreferenceBatch]):
    """Ranks the chosen completion above the rejected one, by Bradley-Terry (with margins) or Plackett-Luce."""

    collator = staticmethod(collate_preferences)

    def count(self, batch: PreferenceBatch) -> int:
        """Number of pairs, or of ranked lists with the listwise loss."""
        if self._config.loss == "listwise":
            return len(batch.row[batch.chosen_index].unique())
        return len(batch.chosen_index)

    def loss(self, engine: ModelEngine, batch: PreferenceBatch) -> LossSum:
        """Return the loss of the pairs or ranked lists, summed over them."""
        lists = self.count(batch)
        outputs, batch = self.outputs(engine, batch)
        scores = scores_at_end(outputs, batch.attention_mask)
        chosen, rejected = scores[batch.chosen_index], scores[batch.rejected_index]
        listwise = self._config.loss == "listwise"
        loss = pairwise_reward_loss(
            chosen,
            rejected=rejected,
            margin=None if listwise else batch.margin,
            centering_coef=self._config.centering_coef,
        )
        if listwise:
            worse = torch.zeros(len(scores), len(scores), dtype=torch.bool, device=scores.device)
            worse[batch.chosen_index, batch.rejected_index] = True
            order = listwise_reward_loss(scores, worse=worse, lists=lists)
            centering = self._config.centering_coef * (chosen + rejected).square().sum()
            loss = LossSum(order.total + centering, order.count, loss.stats)
        return self.with_head_counts(loss, (chosen > rejected).detach(), batch.head[batch.chosen_index])

    def calibration_data(self, engine: ModelEngine, batch: PreferenceBatch) -> CalibrationData:
        """Return the margins of the pairs, and the scores of the completions that are compared."""
        outputs, batch = self.outputs(engine, batch)
        scores = scores_at_end(outputs, batch.attention_mask)
        compared = torch.cat([batch.chosen_index, batch.rejected_index]).unique()
        return CalibrationData(
            scores[batch.chosen_index] - scores[batch.rejected_index],
            batch.head[batch.chosen_index],
            scores[compared],
            batch.head[compared],
        )

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """The mean loss; the other metrics are means over pairs."""
        compared = means["compared"] or 1.0
        names = ("accuracy", "margin", "chosen_score", "rejected_score")
        pairs = {f"{prefix}/{name}": means[name] / compared for name in names}
        return {f"{prefix}/loss": means["loss"], **pairs, **self.head_accuracies(means, prefix)}
