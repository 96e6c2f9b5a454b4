"""Decoders of whole models, and their log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.functional.logprobs import token_logprobs
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops.quantisation import Quantization
from hybrid_rlhf.generation.weights.inference_weights import SharedWeights
from hybrid_rlhf.generation.weights.probe import probe_logits
from hybrid_rlhf.runtime.world import World


def decoder_of(
    lm: PreTrainedModel, *, world: World, dtype: torch.dtype, quantization: Quantization | None = None
) -> Decoder | None:
    """The decoder of a model with full weights; None if it has no inference weights."""
    shared = SharedWeights.of(lm, world=world, dtype=dtype, quantization=quantization)
    return None if shared is None else shared.newer()


def probe_logprobs(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """The log-probs [P - 1] float32 of all P tokens except the first."""
    logits = probe_logits(decoder, tokens)
    return token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device))
