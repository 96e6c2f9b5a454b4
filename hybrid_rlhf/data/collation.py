"""Rows of token ids to right-padded tensors. Lengths live in masks: a pad token may be any token, eos included.

Shapes: B rows, N answers, P pairs, T time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from hybrid_rlhf.data.bins import sequences


class _Batch:
    """A dataclass of tensors that moves as one."""

    def to(self, device: torch.device) -> Self:
        """The batch on a device."""
        return type(self)(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class TokenBatch(_Batch):
    """Conversations or text."""

    input_ids: Tensor
    """[B, T] int64."""
    attention_mask: Tensor
    """[B, T] bool, true on real tokens."""
    loss_mask: Tensor
    """[B, T] bool, true on tokens with loss."""


@dataclass(frozen=True)
class PreferenceBatch(_Batch):
    """Answers with their prompts, each once, and pairs of them."""

    input_ids: Tensor
    """[N, T] int64."""
    attention_mask: Tensor
    """[N, T] bool."""
    chosen_index: Tensor
    """[P] int64, rows of the better answers."""
    rejected_index: Tensor
    """[P] int64, rows of the worse ones."""
    margin: Tensor
    """[P] float32."""
    response_mask: Tensor
    """[N, T] bool, true on an answer's own tokens."""
    ref_logprobs: Tensor
    """[N] float32, of each answer under the reference, where rows have it; else 0."""
    row: Tensor
    """[N] int64, the row of the data that an answer is of."""
    head: Tensor
    """[N] int64, which of several scores its row teaches; else 0."""


@dataclass(frozen=True)
class JudgedBatch(_Batch):
    """Answers with their prompts, and tokens of them whose score has a label."""

    input_ids: Tensor
    """[N, T] int64."""
    attention_mask: Tensor
    """[N, T] bool."""
    head: Tensor
    """[N] int64, as of pairs."""
    answer_index: Tensor
    """[L] int64, the row of each label."""
    token_index: Tensor
    """[L] int64, its token."""
    labels: Tensor
    """[L] float32 in [0, 1], 1 is good."""


@dataclass(frozen=True)
class LabelledBatch(_Batch):
    """Answers with their prompts that are good or bad, and answers to other prompts that are neither."""

    input_ids: Tensor
    """[N, T] int64."""
    attention_mask: Tensor
    """[N, T] bool."""
    response_mask: Tensor
    """[N, T] bool, true on an answer's own tokens."""
    ref_logprobs: Tensor
    """[N] float32, of each answer under the reference, where rows have it; else 0."""
    labelled_index: Tensor
    """[R] int64, rows with a label."""
    mismatched_index: Tensor
    """[K] int64, rows with another prompt's answer."""
    good: Tensor
    """[R] bool."""


def collate_tokens(rows: Sequence[Mapping[str, Any] | None], pad_token_id: int) -> TokenBatch:
    """Rows with `input_ids` and `loss_mask`, or packed ones; None gives a row of one token that counts nowhere."""
    rows = [sequence for row in rows for sequence in sequences(row)]
    ids, attention = _pad([row["input_ids"] if row is not None else [pad_token_id] for row in rows], pad_token_id)
    loss = torch.zeros_like(attention)
    for index, row in enumerate(rows):
        if row is not None:
            loss[index, : len(row["loss_mask"])] = torch.tensor(row["loss_mask"], dtype=torch.bool)
    loss[:, 0] = False  # it has no predecessor, so that nothing can be learned of it
    return TokenBatch(ids, attention, loss)


def collate_preferences(rows: Sequence[Mapping[str, Any] | None], pad_token_id: int) -> PreferenceBatch:
    """Rows with `responses`, `masks`, `pairs` and `margins`; None gives an answer of one token and no pair."""
    answers = _Answers(pad_token_id)
    pairs: list[tuple[int, int]] = []
    margins: list[float] = []
    for row in rows:
        first = answers.add(row)
        if row is not None:
            pairs += [(better + first, worse + first) for better, worse in row["pairs"]]
            margins += row["margins"]
    ids, attention = answers.tensors()
    index = torch.tensor(pairs, dtype=torch.long).view(-1, 2)
    margin = torch.tensor(margins, dtype=torch.float32)
    return PreferenceBatch(
        ids,
        attention,
        index[:, 0],
        index[:, 1],
        margin,
        answers.own(),
        answers.reference(),
        answers.rows(),
        answers.heads(),
    )


def collate_judged(rows: Sequence[Mapping[str, Any] | None], pad_token_id: int) -> JudgedBatch:
    """Rows with `responses` and `labels`, one an answer, read at its last token; or with `ends` too, the places of
    tokens in the only answer, and a label of each. None as for preferences."""
    answers = _Answers(pad_token_id)
    places: list[tuple[int, int]] = []
    labels: list[float] = []
    for row in rows:
        first = answers.add(row)
        if row is not None:
            if "ends" in row:
                places += [(first, end) for end in row["ends"]]
            else:
                places += [(first + i, len(ids) - 1) for i, ids in enumerate(row["responses"])]
            labels += row["labels"]
    ids, attention = answers.tensors()
    index = torch.tensor(places, dtype=torch.long).view(-1, 2)
    return JudgedBatch(
        ids, attention, answers.heads(), index[:, 0], index[:, 1], torch.tensor(labels, dtype=torch.float32)
    )


def collate_labelled(rows: Sequence[Mapping[str, Any] | None], pad_token_id: int) -> LabelledBatch:
    """Rows with `responses`, `masks` and `labels`, the responses without a label another prompt's; None as for
    preferences."""
    answers = _Answers(pad_token_id)
    labelled: list[int] = []
    mismatched: list[int] = []
    good: list[bool] = []
    for row in rows:
        first = answers.add(row)
        if row is not None:
            others = first + len(row["labels"])
            labelled += range(first, others)
            mismatched += range(others, first + len(row["responses"]))
            good += row["labels"]
    ids, attention = answers.tensors()
    return LabelledBatch(
        ids, attention, answers.own(), answers.reference(), torch.tensor(labelled, dtype=torch.long),
        torch.tensor(mismatched, dtype=torch.long), torch.tensor(good, dtype=torch.bool),
    )  # fmt: skip


class _Answers:
    """Answers of many rows, one below the other."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id
        self._ids: list[list[int]] = []
        self._masks: list[list[bool]] = []
        self._reference: list[float] = []
        self._rows: list[int] = []
        self._heads: list[int] = []
        self._count = 0

    def add(self, row: Mapping[str, Any] | None) -> int:
        """Add a row's; the place of its first."""
        first = len(self._ids)
        ids = [[self._pad_token_id]] if row is None else row["responses"]
        self._ids += ids
        self._masks += [[False]] if row is None else row["masks"]
        self._rows += [self._count] * len(ids)
        self._heads += [0 if row is None else row.get("head", 0)] * len(ids)
        self._count += 1
        self._reference += [0.0] * len(ids) if row is None or "ref_logprobs" not in row else row["ref_logprobs"]
        return first

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Ids and the mask of real tokens [N, T]."""
        return _pad(self._ids, self._pad_token_id)

    def own(self) -> Tensor:
        """[N, T] bool, true on an answer's own tokens."""
        own = _pad(self._masks, 0)[0].bool()
        own[:, 0] = False  # as of collate_tokens
        return own

    def rows(self) -> Tensor:
        """[N] int64, the row that each is of."""
        return torch.tensor(self._rows, dtype=torch.long)

    def heads(self) -> Tensor:
        """[N] int64, the score that each teaches."""
        return torch.tensor(self._heads, dtype=torch.long)

    def reference(self) -> Tensor:
        """[N] float32 under the reference."""
        return torch.tensor(self._reference, dtype=torch.float32)


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and the mask of real tokens."""
    ids = torch.full((len(rows), max(len(row) for row in rows)), pad_token_id, dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask[index, : len(row)] = True
    return ids, mask
