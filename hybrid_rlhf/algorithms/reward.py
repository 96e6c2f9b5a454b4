"""Step 2: a reward model, one score at the last real token of an answer, or one a step.

From pairs (Ouyang et al. 2022, arXiv 2203.02155, eq. 1) and ranked lists here; from labels in judged.py. All answers
of one prompt pass in one batch, each once. With several heads a row teaches one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.supervised import Objective
from hybrid_rlhf.configs.reward import PreferenceConfig
from hybrid_rlhf.data.collation import JudgedBatch, PreferenceBatch, collate_preferences
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.losses import LossSum, pairwise_reward_loss
from hybrid_rlhf.functional.reward_losses import listwise_reward_loss
from hybrid_rlhf.models.policy import of_heads, scores_at_end

ScoredT = TypeVar("ScoredT", PreferenceBatch, JudgedBatch)


@dataclass(frozen=True)
class Judgements:
    """What a model says of rows, for its calibration."""

    leads: Tensor
    """[E] by how much each judgement is right, see functional/calibration.py."""
    lead_heads: Tensor
    """[E] int64."""
    scores: Tensor
    """[N] of answers, or steps."""
    score_heads: Tensor
    """[N] int64."""


class ScoreObjective(Objective[ScoredT]):
    """What the objectives on scores share."""

    name = "reward"

    def __init__(self, config: PreferenceConfig, *, pad_token_id: int, device: torch.device) -> None:
        self._config = config
        self._pad_token_id, self._device = pad_token_id, device

    @abstractmethod
    def judgements(self, engine: ModelEngine, batch: ScoredT) -> Judgements:
        """What is said of a batch."""

    def tokens(self, batch: ScoredT) -> int:
        """See Objective."""
        return int(batch.attention_mask.sum())

    def outputs(self, engine: ModelEngine, batch: ScoredT) -> Tensor:
        """[N, T] the scores after each token, of the head that each answer teaches."""
        return of_heads(engine(batch.input_ids, batch.attention_mask), batch.head)

    def with_heads(self, loss: LossSum, right: Tensor, heads: Tensor) -> LossSum:
        """A loss with how many judgements there are, and of each head how many are right.

        Args:
            loss: whose stats are sums over judgements.
            right: [E] bool, of each.
            heads: [E] int64.
        """
        stats = {**loss.stats, "judged": torch.full_like(right, 1.0, dtype=torch.float32).sum()}
        for place, name in enumerate(self._config.heads):
            stats[f"right_{name}"] = (right & (heads == place)).float().sum()
            stats[f"judged_{name}"] = (heads == place).float().sum()
        return replace(loss, stats=stats)

    def of_heads(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """Accuracy of each head that was judged."""
        return {
            f"{prefix}/accuracy_{name}": means[f"right_{name}"] / means[f"judged_{name}"]
            for name in self._config.heads
            if means[f"judged_{name}"]
        }


class RewardObjective(ScoreObjective[PreferenceBatch]):
    """Scores that put the better answer above the worse; a margin is Bradley-Terry's alone."""

    def collate(self, rows: Sequence[Mapping[str, Any] | None]) -> PreferenceBatch:
        """See Objective."""
        return collate_preferences(rows, self._pad_token_id).to(self._device)

    def count(self, batch: PreferenceBatch) -> int:
        """See Objective: pairs, or ranked lists."""
        if self._config.loss == "listwise":
            return len(batch.row[batch.chosen_index].unique())
        return len(batch.chosen_index)

    def loss(self, engine: ModelEngine, batch: PreferenceBatch) -> LossSum:
        """See Objective."""
        scores = scores_at_end(self.outputs(engine, batch), batch.attention_mask)
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
            order = listwise_reward_loss(scores, worse=worse, lists=self.count(batch))
            centring = self._config.centering_coef * (chosen + rejected).square().sum()
            loss = LossSum(order.total + centring, order.count, loss.stats)
        return self.with_heads(loss, (chosen > rejected).detach(), batch.head[batch.chosen_index])

    def judgements(self, engine: ModelEngine, batch: PreferenceBatch) -> Judgements:
        """See ScoreObjective."""
        scores = scores_at_end(self.outputs(engine, batch), batch.attention_mask)
        judged = torch.cat([batch.chosen_index, batch.rejected_index]).unique()
        return Judgements(
            scores[batch.chosen_index] - scores[batch.rejected_index], batch.head[batch.chosen_index],
            scores[judged], batch.head[judged],
        )  # fmt: skip

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """See Objective: means over pairs, but for the loss."""
        judged = means["judged"] or 1.0
        names = ("accuracy", "margin", "chosen_score", "rejected_score")
        pairs = {f"{prefix}/{name}": means[name] / judged for name in names}
        return {f"{prefix}/loss": means["loss"], **pairs, **self.of_heads(means, prefix)}
