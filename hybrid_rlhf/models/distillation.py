"""A teacher: a model that returns hidden states, of which a student's head (policy.py) computes a divergence.

It is a module because under ZeRO-3 the weight of a head is gathered only around the forward of its module, and a
DeepSpeed engine wraps one module.

Shapes: B batch, T time, N trained tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.models.policy import HeadLogprobs, backbone_hidden, model_rows
from hybrid_rlhf.models.vision import Images

CHUNK_LOGITS = 14
"""Largest number of float32 tensors [chunk, V] alive at once (jensen_shannon; forward needs 9)."""


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
