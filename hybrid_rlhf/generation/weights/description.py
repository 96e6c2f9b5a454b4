"""A causal LM described by numbers: all that the decoder and its weights need to know of it.

Why data: model families differ in a dozen choices (norm, positions, heads, MLP, soft caps). `families.py` reads them
once from a Hugging Face model; the decoder and its weights follow them and name no family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Block = Literal["sequential", "parallel", "post_norm"]
QKVOrder = Literal["stacked", "grouped"]
"""Rows of a fused QKV weight: stacked, all of Q, then K, then V; grouped, per KV head its queries, key and value."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions (arXiv 2104.09864) over the first 2 * len(inv_freq) dimensions of a head, halves rotated."""

    inv_freq: Tensor
    """[R / 2] float32."""
    scaling: float = 1.0
    """Cosines and sines are multiplied by it (YaRN)."""


@dataclass(frozen=True, eq=False)
class AttentionKind:
    """Attention settings in which layers of one model may differ."""

    scale: float
    """Scores are multiplied by it."""
    window: int | None = None
    """Tokens a query attends to, itself included; none: all before it."""
    rotary: Rotary | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelDescription:
    """A decoder-only transformer. Sizes are those of the whole model, not of a tensor-parallel rank."""

    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    kinds: tuple[AttentionKind, ...]
    layer_kinds: tuple[int, ...]
    """For each layer, its index in `kinds`."""
    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_offset: float = 0.0
    """Added to the weights of RMS norms: Gemma stores them minus 1."""
    norm_in_float32: bool = False
    """The norm is multiplied by its weight before rounding (Gemma), not after (Llama)."""
    block: Block = "sequential"
    activation: Activation = "silu"
    qkv_order: QKVOrder = "stacked"
    transposed: bool = False
    """Weights of the layers are stored [in, out] (GPT-2's Conv1D)."""
    position_offset: int = 0
    """Row of the first position in the table of learned positions."""
    max_positions: int | None = None
    """Rows of the table of learned positions; none: positions are computed, without a limit."""
    alibi: Tensor | None = None
    """[heads] ALiBi slopes (arXiv 2108.12409): slope times the key's position is added to scores; none: no ALiBi."""
    alibi_scale: float = 1.0
    """The bias is multiplied by it (Falcon scales it like the scores)."""
    alibi_bfloat16: bool = False
    """The bias is rounded to bfloat16 before scaling, as Falcon computes it."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    logit_scale: float = 1.0
    embed_scale: float = 1.0

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layer_kinds)
