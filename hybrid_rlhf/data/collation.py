"""Collates rows of token ids into right-padded tensors. Masks give the lengths: the pad token may be any token, also
EOS.

Shapes: B rows, N sequences (a prompt with one completion), P pairs, L labels, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybrid_rlhf.data.images.references import ImageReference, tokenised_images
from hybrid_rlhf.data.packing import row_sequences
from hybrid_rlhf.functional.transfers import moved

_OF_MODELS = ("input_ids", "attention_mask", "images")
"""What models read of a batch."""


@dataclass(frozen=True)
class _Batch:
    """A dataclass of tensors, and the images of its rows."""

    images: Sequence[Sequence[ImageReference]] | None = field(default=None, kw_only=True)
    """The images of each row of `input_ids`; None where no row of the data has one."""

    def for_loss(self, device: torch.device) -> Self:
        """The batch with the tensors that losses read on a device; what models read stays on the host."""
        read = {name: tensor for name, tensor in vars(self).items() if name not in _OF_MODELS}
        return type(self)(**(vars(self) | moved(read, device)))


@dataclass(frozen=True)
class TokenBatch(_Batch):
    """Conversations or plain text."""

    input_ids: Tensor
    """[B, T] int64."""
    attention_mask: Tensor
    """[B, T] bool, true on real tokens."""
    loss_mask: Tensor
    """[B, T] bool, true on tokens with loss."""


@dataclass(frozen=True)
class CompletionBatch(_Batch):
    """Completions with their prompts, each once."""

    input_ids: Tensor
    """[N, T] int64."""
    attention_mask: Tensor
    """[N, T] bool."""
    response_mask: Tensor
    """[N, T] bool, true on tokens of the completion."""
    ref_logprobs: Tensor
    """[N] float32, log-probability of the completion under the reference, if rows have it; otherwise 0."""
    row: Tensor
    """[N] int64, the row of the batch that contains the sequence."""
    head: Tensor
    """[N] int64, the reward head that the row trains; 0 with a single head."""


@dataclass(frozen=True)
class PreferenceBatch(CompletionBatch):
    """Completions, and pairs of them."""

    chosen_index: Tensor
    """[P] int64, the sequence of the chosen completion."""
    rejected_index: Tensor
    """[P] int64, the sequence of the rejected completion."""
    margin: Tensor
    """[P] float32."""


@dataclass(frozen=True)
class RewardLabelBatch(CompletionBatch):
    """Completions, and labels for the scores at some of their tokens."""

    sequence_index: Tensor
    """[L] int64, the sequence of each label."""
    token_index: Tensor
    """[L] int64, the token of each label."""
    labels: Tensor
    """[L] float32 in [0, 1], 1 is desirable."""


@dataclass(frozen=True)
class PreferenceLabelBatch(CompletionBatch):
    """Completions that are labelled as desirable or not, and mismatched ones of other prompts without labels.

    Shapes: R labelled sequences, K mismatched sequences.
    """

    labelled_index: Tensor
    """[R] int64, the labelled sequences."""
    mismatched_index: Tensor
    """[K] int64, the sequences with a completion of another prompt."""
    desirable: Tensor
    """[R] bool."""


def collate_tokens(rows: Sequence[Mapping[str, Any] | None], pad_token_id: int) -> TokenBatch:
    """Collate rows with `input_ids` and `loss_mask`, or packed rows; None becomes one token that no mask includes."""
    sequences = [
        sequence or {"input_ids": [pad_token_id], "loss_mask": [False]}
        for row in rows
        for sequence in row_sequences(row)
    ]
    ids, attention = padded([sequence["input_ids"] for sequence in sequences], pad_token_id)
    return TokenBatch(ids, attention, _loss_mask([sequence["loss_mask"] for sequence in sequences]))


def collate_preferences(rows: Sequence[Mapping[str, Any] | None], pad_token_id: int) -> PreferenceBatch:
    """Collate rows with `responses`, `masks`, `pairs` and `margins`; None becomes a sequence of one token without
    pairs."""
    completions, firsts = _completions(rows, pad_token_id)
    pairs = [(chosen + first, rejected + first) for row, first in firsts for chosen, rejected in row["pairs"]]
    index = torch.tensor(pairs, dtype=torch.long).view(-1, 2)
    margins = [margin for row, _ in firsts for margin in row["margins"]]
    return PreferenceBatch(
        **vars(completions),
        chosen_index=index[:, 0],
        rejected_index=index[:, 1],
        margin=torch.tensor(margins, dtype=torch.float32),
    )


def collate_reward_labels(rows: Sequence[Mapping[str, Any] | None], pad_token_id: int) -> RewardLabelBatch:
    """Collate rows with `responses` and `labels`: one label per sequence, at its last token, or, with a column `ends`,
    one label per listed token of the only sequence. None becomes a sequence of one token without labels."""
    completions, firsts = _completions(rows, pad_token_id)
    labelled_tokens: list[tuple[int, int]] = []
    for row, first in firsts:
        if "ends" in row:
            labelled_tokens += [(first, end) for end in row["ends"]]
        else:
            labelled_tokens += [(first + i, len(ids) - 1) for i, ids in enumerate(row["responses"])]
    index = torch.tensor(labelled_tokens, dtype=torch.long).view(-1, 2)
    labels = [label for row, _ in firsts for label in row["labels"]]
    return RewardLabelBatch(
        **vars(completions),
        sequence_index=index[:, 0],
        token_index=index[:, 1],
        labels=torch.tensor(labels, dtype=torch.float32),
    )


def collate_preference_labels(rows: Sequence[Mapping[str, Any] | None], pad_token_id: int) -> PreferenceLabelBatch:
    """Collate rows with `responses`, `masks` and `labels`; responses beyond the labels are mismatched completions. None
    becomes a sequence of one token without a label."""
    completions, firsts = _completions(rows, pad_token_id)
    labelled: list[int] = []
    mismatched: list[int] = []
    for row, first in firsts:
        first_mismatched = first + len(row["labels"])
        labelled += range(first, first_mismatched)
        mismatched += range(first_mismatched, first + len(row["responses"]))
    desirable = [label for row, _ in firsts for label in row["labels"]]
    return PreferenceLabelBatch(
        **vars(completions),
        labelled_index=torch.tensor(labelled, dtype=torch.long),
        mismatched_index=torch.tensor(mismatched, dtype=torch.long),
        desirable=torch.tensor(desirable, dtype=torch.bool),
    )


def images_of(rows: Sequence[Mapping[str, Any] | None]) -> list[list[ImageReference]]:
    """The images of each sequence that collating rows gives: of each row, or of each of its `responses`, which names
    them in `image_order`."""
    found = []
    for sequence in (sequence for row in rows for sequence in row_sequences(row)):
        images = [] if sequence is None else tokenised_images(sequence)
        if sequence is None or "responses" not in sequence:
            found.append(images)
        else:
            orders = sequence.get("image_order") or [[] for _ in sequence["responses"]]
            found += [[images[number] for number in order] for order in orders]
    return found


def _completions(
    rows: Sequence[Mapping[str, Any] | None], pad_token_id: int
) -> tuple[CompletionBatch, list[tuple[Mapping[str, Any], int]]]:
    """All completions, and each row that is not None with the index of its first sequence."""
    ids: list[list[int]] = []
    masks: list[list[bool]] = []
    ref_logprobs: list[float] = []
    of_rows: list[int] = []
    heads: list[int] = []
    firsts = []
    for number, row in enumerate(rows):
        if row is not None:
            firsts.append((row, len(ids)))
        sequences = row or {"responses": [[pad_token_id]], "masks": [[False]]}
        count = len(sequences["responses"])
        ids += sequences["responses"]
        masks += sequences["masks"]
        ref_logprobs += sequences.get("ref_logprobs", [0.0] * count)
        of_rows += [number] * count
        heads += [sequences.get("head", 0)] * count
    columns = map(torch.tensor, (ref_logprobs, of_rows, heads))
    return CompletionBatch(*padded(ids, pad_token_id), _loss_mask(masks), *columns), firsts


def _loss_mask(rows: Sequence[Sequence[bool]]) -> Tensor:
    """[B, T] bool; the first token has no predecessor that could predict it."""
    mask = padded(rows, 0)[0].bool()
    mask[:, 0] = False
    return mask


def padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] and the mask of tokens that are not padding."""
    ids = pad_sequence(
        [torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=pad_token_id
    )
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]
