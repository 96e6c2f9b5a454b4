"""Step 2: a reward model from preferences (Bradley-Terry), one score at the last real token of an answer.

Source: Ouyang et al. 2022 (arXiv 2203.02155), eq. 1. All pairs of one prompt pass in one
batch element, each answer once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybrid_rlhf.algorithms.supervised import Objective
from hybrid_rlhf.data.collation import PreferenceBatch, collate_preferences
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.losses import LossSum, pairwise_reward_loss
from hybrid_rlhf.models.policy import scores_at_end


class RewardObjective(Objective[PreferenceBatch]):
    """Scores that put the better answer above the worse."""

    name = "reward"

    def __init__(self, *, pad_token_id: int, device: torch.device, centering_coef: float = 0.0) -> None:
        self._pad_token_id, self._device = pad_token_id, device
        self._centering_coef = centering_coef

    def collate(self, rows: Sequence[Mapping[str, Any] | None]) -> PreferenceBatch:
        """See Objective."""
        return collate_preferences(rows, self._pad_token_id).to(self._device)

    def count(self, batch: PreferenceBatch) -> int:
        """See Objective: pairs."""
        return len(batch.chosen_index)

    def tokens(self, batch: PreferenceBatch) -> int:
        """See Objective."""
        return int(batch.attention_mask.sum())

    def loss(self, engine: ModelEngine, batch: PreferenceBatch) -> LossSum:
        """See Objective."""
        scores = scores_at_end(engine(batch.input_ids, batch.attention_mask), batch.attention_mask)
        return pairwise_reward_loss(
            scores[batch.chosen_index],
            rejected=scores[batch.rejected_index],
            margin=batch.margin,
            centering_coef=self._centering_coef,
        )

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """See Objective."""
        return {
            f"{prefix}/{name}": means[name] for name in ("loss", "accuracy", "margin", "chosen_score", "rejected_score")
        }
