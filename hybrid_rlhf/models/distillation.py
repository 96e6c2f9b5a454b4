"""Student and teacher: a policy whose head also tells how far it is from a teacher, and one that gives hidden states.

Why modules: under ZeRO-3 a head's weight is whole only around its module's forward, and a DeepSpeed engine wraps one.

Shapes: B batch, T time, N tokens that are learned from, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.functional.distillation import DistillationRule, Head, divergence_from_hidden
from hybrid_rlhf.models.policy import HeadLogprobs, Policy, hidden_before

CHUNK_TOKENS = 256
"""Tokens whose logits are held at a time: those of two models, and what a divergence makes of them."""
CHUNK_LOGITS = 14
"""Tensors [chunk, V] in float32 that are alive at once, at most (jensen_shannon; forward takes 9)."""


@dataclass(frozen=True)
class Lesson:
    """What a teacher says of the tokens of a batch."""

    hidden: Tensor
    """[N, H] its states before them."""
    head: HeadLogprobs
    """Its head, whole."""
    rule: DistillationRule


class Teacher(nn.Module):
    """A causal LM that is asked for the states from which it would tell the next token."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.head = HeadLogprobs(lm)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_mask: Tensor) -> Tensor:
        """[N, H] before the tokens of a mask [B, T], row by row; a row's first token has none."""
        return hidden_before(self.lm, input_ids, attention_mask, token_mask)[0]


class StudentHead(HeadLogprobs):
    """A head that also computes the loss of a lesson."""

    def forward(self, hidden: Tensor, labels: Tensor, temperature: float, lesson: Lesson | None = None) -> Any:
        """Without a lesson as HeadLogprobs; with one, loss, divergence and -log p(labels), scalar sums."""
        if lesson is None:
            return super().forward(hidden, labels, temperature)
        states, head = _scaled(self, hidden)
        teacher_states, teacher_head = _scaled(lesson.head, lesson.hidden)
        return divergence_from_hidden(
            states, head, teacher_hidden=teacher_states, teacher_head=teacher_head, labels=labels, rule=lesson.rule,
            chunk_tokens=CHUNK_TOKENS,
        )  # fmt: skip


class Student(Policy):
    """A policy that can also learn from a lesson."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        self.head = StudentHead(lm)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_mask: Tensor, temperature: float = 1.0,
        lesson: Lesson | None = None,
    ) -> Any:  # fmt: skip
        """Without a lesson as Policy; with one, loss, divergence and -log p of the tokens, scalar sums."""
        if lesson is None:
            return super().forward(input_ids, attention_mask, token_mask, temperature)
        hidden, wanted = hidden_before(self.lm, input_ids, attention_mask, token_mask)
        return self.head(hidden, input_ids[wanted], temperature, lesson)


def _scaled(head: HeadLogprobs, hidden: Tensor) -> tuple[Tensor, Head]:
    """What the head's convention makes of states and bias."""
    states, bias = head.scaled(hidden)
    return states, Head(head.weight, bias, head.convention.softcap, head.float32_logits)
