"""Rows of token ids to right-padded tensors. Lengths live in masks: a pad token may be any token, eos included.

Shapes: B rows, N answers, P pairs, T time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor


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


def collate_tokens(rows: Sequence[Mapping[str, Any] | None], pad_token_id: int) -> TokenBatch:
    """Rows with `input_ids` and `loss_mask`; None gives a row of one token that counts nowhere."""
    ids, attention = _pad([row["input_ids"] if row is not None else [pad_token_id] for row in rows], pad_token_id)
    loss = torch.zeros_like(attention)
    for index, row in enumerate(rows):
        if row is not None:
            loss[index, : len(row["loss_mask"])] = torch.tensor(row["loss_mask"], dtype=torch.bool)
    return TokenBatch(ids, attention, loss)


def collate_preferences(rows: Sequence[Mapping[str, Any] | None], pad_token_id: int) -> PreferenceBatch:
    """Rows with `responses`, `pairs` and `margins`; None gives an answer of one token and no pair."""
    answers: list[list[int]] = []
    pairs: list[tuple[int, int]] = []
    margins: list[float] = []
    for row in rows:
        if row is None:
            answers.append([pad_token_id])
            continue
        pairs += [(better + len(answers), worse + len(answers)) for better, worse in row["pairs"]]
        margins += row["margins"]
        answers += row["responses"]
    ids, attention = _pad(answers, pad_token_id)
    index = torch.tensor(pairs, dtype=torch.long).view(-1, 2)
    return PreferenceBatch(ids, attention, index[:, 0], index[:, 1], torch.tensor(margins, dtype=torch.float32))


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and the mask of real tokens."""
    ids = torch.full((len(rows), max(len(row) for row in rows)), pad_token_id, dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask[index, : len(row)] = True
    return ids, mask
