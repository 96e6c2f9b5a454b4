"""Objectives of preference learning: pairs of completions, and completions with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hybrid_rlhf.data.collation import (
    PreferenceBatch,
    PreferenceLabelBatch,
    collate_preference_labels,
    collate_preferences,
)
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.functional.transfers import moved
from hybrid_rlhf.supervised.preference.kto import KTO
from hybrid_rlhf.supervised.preference.pair_loss import PairLoss, PairSide
from hybrid_rlhf.supervised.preference.reference import (
    BatchT,
    EngineContext,
    completion_logprobs,
)
from hybrid_rlhf.supervised.trainer import Objective

LossT = TypeVar("LossT")


class PreferenceObjective(Objective[BatchT], Generic[BatchT, LossT]):
    """Base of the objectives of preference learning."""

    name = "preference"

    def __init__(self, loss: LossT, *, reference: EngineContext | None = None, **settings: Any) -> None:
        """Take the loss, a reference to run at each update (None if rows have its log-probs, or the loss needs none),
        and the settings of `Objective`."""
        super().__init__(**settings)
        self._loss: LossT = loss
        self._reference = reference

    @torch.no_grad()
    def prepare(self, engine: ModelEngine, batches: Sequence[BatchT]) -> Sequence[BatchT]:
        """Add the reference's log-probs, if the reference runs at each update."""
        if self._reference is None:
            return batches
        with self._reference() as reference:
            return [replace(batch, ref_logprobs=completion_logprobs(reference, batch)) for batch in batches]


class PreferencePairObjective(PreferenceObjective[PreferenceBatch, PairLoss]):
    """A loss on pairs. All completions of a prompt are in one micro-batch, each once."""

    collator = staticmethod(collate_preferences)

    def count(self, batch: PreferenceBatch) -> int:
        """Number of pairs."""
        return len(batch.chosen_index)

    def loss(self, engine: ModelEngine, batch: PreferenceBatch) -> LossSum:
        """Return the loss, summed over pairs."""
        logprobs = completion_logprobs(engine, batch)
        batch = batch.for_loss(self._device)
        tokens = _lengths(batch)

        def side(index: Tensor) -> PairSide:
            return PairSide(logprobs[index], batch.ref_logprobs[index], tokens[index])

        loss = self._loss(side(batch.chosen_index), side(batch.rejected_index))
        both = torch.cat([batch.chosen_index, batch.rejected_index])
        halves = torch.full_like(both, 0.5, dtype=logprobs.dtype)
        return engine.with_router_losses(loss, torch.zeros_like(logprobs).index_add_(0, both, halves))

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """Means over pairs of loss, accuracy, margin, rewards and SFT loss."""
        names = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "sft")
        return {f"{prefix}/{name}": means[name] for name in names}


class PreferenceLabelObjective(PreferenceObjective[PreferenceLabelBatch, KTO]):
    """The loss of KTO on completions with labels."""

    collator = staticmethod(collate_preference_labels)
    _reference_point: Tensor
    """Computed by `prepare`, for the batches of an update."""

    @torch.no_grad()
    def prepare(self, engine: ModelEngine, batches: Sequence[PreferenceLabelBatch]) -> Sequence[PreferenceLabelBatch]:
        """Add live reference log-probs, and compute the reference point as a mean over the whole update."""
        batches = super().prepare(engine, batches)
        sums = torch.zeros(2, device=self._device)
        for batch in batches:
            rows = _or_first(batch.mismatched_index)
            ref_logprobs, index = moved((batch.ref_logprobs, rows), self._device)
            log_ratio = _logprobs_of(engine, batch, rows) - ref_logprobs[index]
            count = len(batch.mismatched_index)
            sums += torch.stack([log_ratio[:count].sum(), torch.full((), float(count), device=self._device)])
        total, count = engine.world.all_reduce(sums)
        self._reference_point = (total / count.clamp(min=1)).clamp(min=0)
        return batches

    def count(self, batch: PreferenceLabelBatch) -> int:
        """Number of completions with a label."""
        return len(batch.desirable)

    def loss(self, engine: ModelEngine, batch: PreferenceLabelBatch) -> LossSum:
        """Return the loss, summed over completions with a label."""
        rows = _or_first(batch.labelled_index)
        count = len(batch.labelled_index)
        logprobs = _logprobs_of(engine, batch, rows)[:count]
        batch = batch.for_loss(self._device)
        rows = _or_first(batch.labelled_index)
        ref_logprobs = batch.ref_logprobs[rows][:count]
        tokens = _lengths(batch)[rows][:count]
        loss = self._loss(
            logprobs - ref_logprobs,
            mean_logprobs=logprobs / tokens,
            good=batch.desirable,
            reference_point=self._reference_point,
        )
        return engine.with_router_losses(loss, (torch.arange(len(rows), device=rows.device) < count).float())

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """Means over completions with a label; rewards are means over good and bad ones separately."""
        good = max(means["good"], 1e-9)
        bad = max(1 - means["good"], 1e-9)
        chosen, rejected = means["good_reward"] / good, means["bad_reward"] / bad
        return {
            f"{prefix}/loss": means["loss"],
            f"{prefix}/accuracy": means["accuracy"],
            f"{prefix}/margin": chosen - rejected,
            f"{prefix}/chosen_reward": chosen,
            f"{prefix}/rejected_reward": rejected,
            f"{prefix}/kl": means["kl"],
        }


def _lengths(batch: PreferenceBatch | PreferenceLabelBatch) -> Tensor:
    return batch.response_mask.sum(dim=1).clamp(min=1)


def _or_first(rows: Tensor) -> Tensor:
    """The rows, or the first row if there are none: every rank must run the same number of forwards."""
    return rows if len(rows) else rows.new_zeros(1)


def _logprobs_of(engine: ModelEngine, batch: PreferenceLabelBatch, rows: Tensor) -> Tensor:
    """[rows] log-probs of some completions of a batch, summed over their tokens."""
    width = int(batch.attention_mask[rows].sum(dim=1).max())
    inputs = (tensor[rows, :width] for tensor in (batch.input_ids, batch.attention_mask, batch.response_mask))
    images = None if batch.images is None else [batch.images[row] for row in rows.tolist()]
    logprobs: Tensor = engine(*inputs, images=images)[0]
    return logprobs.sum(dim=1)
