"""Student and teacher: a policy whose head also computes the distillation loss, and a model that returns hidden states.

They are modules because under ZeRO-3 the weight of a head is gathered only around the forward of its module, and a
DeepSpeed engine wraps one module.

Shapes: B batch, T time, N trained tokens, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.functional.distillation import DistillationRule, OutputHead, divergence_from_hidden
from hybrid_rlhf.models.policy import HeadLogprobs, Policy, backbone_hidden, model_rows
from hybrid_rlhf.models.vision import Images

CHUNK_TOKENS = 256
"""Number of tokens for which the logits of both models are in memory at a time."""
CHUNK_LOGITS = 14
"""Largest number of float32 tensors [chunk, V] alive at once (jensen_shannon; forward needs 9)."""


@dataclass(frozen=True)
class TeacherTargets:
    """The teacher's predictions for the tokens of a batch."""

    hidden: Tensor
    """[N, H], hidden states before the tokens."""
    head: HeadLogprobs
    """The teacher's head, with gathered weights."""
    rule: DistillationRule


class Teacher(nn.Module):
    """A causal LM that returns the hidden states from which it predicts each token."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.head = HeadLogprobs(lm)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_mask: Tensor,
        *,
        images: Images | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Hidden states [N, H] before the tokens of a mask [B, T], row by row; the first token of a row has none."""
        rows = model_rows(self.lm, input_ids, attention_mask, token_mask, images=images, device=device)
        return backbone_hidden(self.lm, rows)


class StudentHead(HeadLogprobs):
    """A head that also computes the distillation loss."""

    def forward(self, hidden: Tensor, labels: Tensor, temperature: float, targets: TeacherTargets | None = None) -> Any:
        """Log-probs as HeadLogprobs without targets; with targets the sums of loss, divergence and -log p(labels),
        scalars."""
        if targets is None:
            return super().forward(hidden, labels, temperature)
        states, head = _scaled(self, hidden)
        teacher_states, teacher_head = _scaled(targets.head, targets.hidden)
        return divergence_from_hidden(
            states,
            head,
            teacher_hidden=teacher_states,
            teacher_head=teacher_head,
            labels=labels,
            rule=targets.rule,
            chunk_tokens=CHUNK_TOKENS,
        )


class Student(Policy):
    """A policy that can also learn from a teacher."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        self.head = StudentHead(lm)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_mask: Tensor,
        temperature: float = 1.0,
        targets: TeacherTargets | None = None,
        *,
        routes: Tensor | None = None,
        images: Images | None = None,
        device: torch.device | None = None,
    ) -> Any:
        """Log-probs as Policy without targets; with targets the sums of loss, divergence and -log p of the tokens,
        scalars."""
        inputs = (input_ids, attention_mask, token_mask)
        if targets is None:
            return super().forward(*inputs, temperature, routes=routes, images=images, device=device)
        rows = self.rows(*inputs, routes=routes, images=images, device=device)
        return self.head(self.hidden(rows), rows.labels, temperature, targets)


def _scaled(head: HeadLogprobs, hidden: Tensor) -> tuple[Tensor, OutputHead]:
    """Hidden states and head, scaled by the family's logit scale."""
    states, bias = head.scaled(hidden)
    convention = head.convention
    return states, OutputHead(head.summed_weight, bias, convention.softcap, head.float32_logits, convention.banned)
