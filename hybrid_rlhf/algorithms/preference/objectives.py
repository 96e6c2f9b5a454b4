"""Preferences as objectives of the supervised loop: pairs of answers, and answers that are good or bad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.preference.kto import KTO
from hybrid_rlhf.algorithms.preference.pairs import Answers, PairLoss
from hybrid_rlhf.algorithms.preference.reference import Reading, answer_logprobs, with_reference
from hybrid_rlhf.algorithms.supervised import Objective
from hybrid_rlhf.data.collation import LabelledBatch, PreferenceBatch, collate_labelled, collate_preferences
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.losses import LossSum


class PairObjective(Objective[PreferenceBatch]):
    """Any loss on pairs. All answers of one prompt pass in one batch, each once."""

    name = "preference"

    def __init__(
        self, pair_loss: PairLoss, *, pad_token_id: int, device: torch.device, reading: Reading | None = None
    ) -> None:
        """Take the loss, and a reference that is asked at each update; none: rows have what it says, or need not."""
        self._pair_loss, self._reading = pair_loss, reading
        self._pad_token_id, self._device = pad_token_id, device

    def collate(self, rows: Sequence[Mapping[str, Any] | None]) -> PreferenceBatch:
        """See Objective."""
        return collate_preferences(rows, self._pad_token_id).to(self._device)

    def prepare(self, engine: ModelEngine, batches: Sequence[PreferenceBatch]) -> Sequence[PreferenceBatch]:
        """See Objective."""
        return batches if self._reading is None else with_reference(batches, self._reading)

    def count(self, batch: PreferenceBatch) -> int:
        """See Objective: pairs."""
        return len(batch.chosen_index)

    def tokens(self, batch: PreferenceBatch) -> int:
        """See Objective."""
        return int(batch.attention_mask.sum())

    def loss(self, engine: ModelEngine, batch: PreferenceBatch) -> LossSum:
        """See Objective."""
        logprobs, tokens = answer_logprobs(engine, batch), _lengths(batch)

        def side(index: Tensor) -> Answers:
            return Answers(logprobs[index], batch.ref_logprobs[index], tokens[index])

        return self._pair_loss(side(batch.chosen_index), side(batch.rejected_index))

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """See Objective."""
        names = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "sft")
        return {f"{prefix}/{name}": means[name] for name in names}


class LabelledObjective(Objective[LabelledBatch]):
    """KTO."""

    name = "preference"

    def __init__(self, kto: KTO, *, pad_token_id: int, device: torch.device, reading: Reading | None = None) -> None:
        """See PairObjective."""
        self._kto, self._reading = kto, reading
        self._pad_token_id, self._device = pad_token_id, device
        self._reference_point = torch.zeros((), device=device)

    def collate(self, rows: Sequence[Mapping[str, Any] | None]) -> LabelledBatch:
        """See Objective."""
        return collate_labelled(rows, self._pad_token_id).to(self._device)

    @torch.no_grad()
    def prepare(self, engine: ModelEngine, batches: Sequence[LabelledBatch]) -> Sequence[LabelledBatch]:
        """See Objective: the reference point is a mean over the whole update."""
        if self._reading is not None:
            batches = with_reference(batches, self._reading)
        sums = torch.zeros(2, device=self._device)
        for batch in batches:
            rows = _or_first(batch.mismatched_index)
            change = _logprobs_of(engine, batch, rows) - batch.ref_logprobs[rows]
            count = len(batch.mismatched_index)
            sums += torch.stack([change[:count].sum(), torch.tensor(float(count), device=self._device)])
        total, count = engine.world.all_reduce(sums)
        self._reference_point = (total / count.clamp(min=1)).clamp(min=0)
        return batches

    def count(self, batch: LabelledBatch) -> int:
        """See Objective: answers with a label."""
        return len(batch.good)

    def tokens(self, batch: LabelledBatch) -> int:
        """See Objective."""
        return int(batch.attention_mask.sum())

    def loss(self, engine: ModelEngine, batch: LabelledBatch) -> LossSum:
        """See Objective."""
        rows, count = _or_first(batch.labelled_index), len(batch.labelled_index)
        logprobs = _logprobs_of(engine, batch, rows)[:count]
        reference, tokens = batch.ref_logprobs[rows][:count], _lengths(batch)[rows][:count]
        return self._kto(
            logprobs - reference, mean_logprobs=logprobs / tokens, good=batch.good,
            reference_point=self._reference_point,
        )  # fmt: skip

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """See Objective: rewards are means over the answers of their kind."""
        good, bad = max(means["good"], 1e-9), max(1 - means["good"], 1e-9)
        chosen, rejected = means["good_reward"] / good, means["bad_reward"] / bad
        return {
            f"{prefix}/loss": means["loss"],
            f"{prefix}/accuracy": means["accuracy"],
            f"{prefix}/margin": chosen - rejected,
            f"{prefix}/chosen_reward": chosen,
            f"{prefix}/rejected_reward": rejected,
            f"{prefix}/kl": means["kl"],
        }


def _lengths(batch: PreferenceBatch | LabelledBatch) -> Tensor:
    return batch.response_mask.sum(dim=1).clamp(min=1)


def _or_first(rows: Tensor) -> Tensor:
    """Rows, or the first where there is none: ranks must run as many forwards as each other."""
    return rows if len(rows) else rows.new_zeros(1)


def _logprobs_of(engine: ModelEngine, batch: LabelledBatch, rows: Tensor) -> Tensor:
    """[rows] the log-prob of some of a batch's answers."""
    width = int(batch.attention_mask[rows].sum(dim=1).max())
    parts = (part[rows, :width] for part in (batch.input_ids, batch.attention_mask, batch.response_mask))
    logprobs: Tensor = engine(*parts)[0]
    return logprobs.sum(dim=1)
