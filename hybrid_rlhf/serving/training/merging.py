"""A model with an adapter merged into its weights, as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.models.pretrained.adapters import LowRank


@torch.no_grad()
def write_merged(
    lm: PreTrainedModel, factors: Mapping[str, LowRank], folder: Path, *, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a merged model; the model itself is unchanged.

    Args:
        lm: the base.
        factors: changes by the names of its weights.
        folder: folder to write.
        tokenizer: its tokenizer, which is written too.
    """
    weights = lm.state_dict()
    for name, change in factors.items():
        weights[name] = change.merged(weights[name])
    lm.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
