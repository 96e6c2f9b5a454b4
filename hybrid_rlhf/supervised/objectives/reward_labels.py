"""Reward models from labels: of whole completions, or of their steps (process reward models).

Sources: Lightman et al. 2023 (arXiv 2305.20050), Uesato et al. 2022 (arXiv 2211.14275). The score is read at the token
that ends the completion or step. Deviation: one score with a sigmoid, where Lightman et al. predict probabilities of
positive, negative and neutral.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybrid_rlhf.data.collation import RewardLabelBatch, collate_reward_labels
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.functional.reward_losses import labelled_reward_loss
from hybrid_rlhf.supervised.objectives.reward_pairs import CalibrationData, ScoreObjective


class RewardLabelObjective(ScoreObjective[RewardLabelBatch]):
    """Trains scores whose sigmoid is the probability that a completion, or a step, is good."""

    collator = staticmethod(collate_reward_labels)

    def count(self, batch: RewardLabelBatch) -> int:
        """Number of labels."""
        return len(batch.labels)

    def loss(self, engine: ModelEngine, batch: RewardLabelBatch) -> LossSum:
        """Return the binary cross-entropy of the labels' scores, summed over labels."""
        outputs, batch = self.outputs(engine, batch)
        scores = outputs[batch.sequence_index, batch.token_index]
        correct = (scores.detach() > 0) == (batch.labels >= 0.5)
        loss = labelled_reward_loss(scores, labels=batch.labels)
        return self.with_head_counts(loss, correct, batch.head[batch.sequence_index])

    def calibration_data(self, engine: ModelEngine, batch: RewardLabelBatch) -> CalibrationData:
        """Return the scores at the labels, and the same scores signed by their labels."""
        outputs, batch = self.outputs(engine, batch)
        scores = outputs[batch.sequence_index, batch.token_index]
        heads = batch.head[batch.sequence_index]
        return CalibrationData(torch.where(batch.labels >= 0.5, scores, -scores), heads, scores, heads)

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """Accuracy over all labels, and mean scores of good and bad ones separately."""
        good = means["good"]
        chosen, rejected = means["chosen_score"] / (good or 1.0), means["rejected_score"] / ((1 - good) or 1.0)
        return {
            f"{prefix}/loss": means["loss"],
            f"{prefix}/accuracy": means["accuracy"],
            f"{prefix}/margin": chosen - rejected,
            f"{prefix}/chosen_score": chosen,
            f"{prefix}/rejected_score": rejected,
            **self.head_accuracies(means, prefix),
        }
