"""Step 2 from labels: answers that are good or bad by themselves, or the steps of an answer (process reward).

Steps: Lightman et al. 2023 (arXiv 2305.20050), Uesato et al. 2022 (arXiv 2211.14275). Both read the label off the token
that ends what it is of. Deviation: one score and a sigmoid, where Lightman et al. give positive, negative and neutral a
probability each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybrid_rlhf.algorithms.reward import Judgements, ScoreObjective
from hybrid_rlhf.data.collation import JudgedBatch, collate_judged
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.functional.reward_losses import labelled_reward_loss


class JudgedObjective(ScoreObjective[JudgedBatch]):
    """Scores whose sigmoid is the chance that an answer, or a step, is good."""

    def collate(self, rows: Sequence[Mapping[str, Any] | None]) -> JudgedBatch:
        """See Objective."""
        return collate_judged(rows, self._pad_token_id).to(self._device)

    def count(self, batch: JudgedBatch) -> int:
        """See Objective: labels."""
        return len(batch.labels)

    def loss(self, engine: ModelEngine, batch: JudgedBatch) -> LossSum:
        """See Objective."""
        scores = self.outputs(engine, batch)[batch.answer_index, batch.token_index]
        right = (scores.detach() > 0) == (batch.labels >= 0.5)
        loss = labelled_reward_loss(scores, labels=batch.labels)
        return self.with_heads(loss, right, batch.head[batch.answer_index])

    def judgements(self, engine: ModelEngine, batch: JudgedBatch) -> Judgements:
        """See ScoreObjective."""
        scores = self.outputs(engine, batch)[batch.answer_index, batch.token_index]
        heads = batch.head[batch.answer_index]
        return Judgements(torch.where(batch.labels >= 0.5, scores, -scores), heads, scores, heads)

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """See Objective: accuracy over labels, scores over those of their kind."""
        good = means["good"]
        chosen, rejected = means["chosen_score"] / (good or 1.0), means["rejected_score"] / ((1 - good) or 1.0)
        return {
            f"{prefix}/loss": means["loss"],
            f"{prefix}/accuracy": means["accuracy"],
            f"{prefix}/margin": chosen - rejected,
            f"{prefix}/chosen_score": chosen,
            f"{prefix}/rejected_score": rejected,
            **self.of_heads(means, prefix),
        }
