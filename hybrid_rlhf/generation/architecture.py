"""One decoder described by numbers: what the inference layout must know of a causal LM.

Why data: a family of models differs from another in a dozen choices (norm, positions, heads, MLP, caps). They are
read once from a Hugging Face model by `families.py`; the decoder and its weights follow them and name no family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Block = Literal["sequential", "parallel", "post_norm"]
QKVOrder = Literal["stacked", "grouped"]
"""Rows of a fused QKV weight: all of Q, then K, then V; or for each KV head its queries, its key, its value."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions (arXiv 2104.09864) over the first 2 * len(inv_freq) dimensions of a head, halves rotated."""

    inv_freq: Tensor
    """[R / 2] float32."""
    scaling: float = 1.0
    """Cosines and sines are multiplied by it (YaRN)."""


@dataclass(frozen=True, eq=False)
class AttentionKind:
    """What layers of one model may differ in."""

    scale: float
    """Scores are multiplied by it."""
    window: int | None = None
    """Tokens a query sees, itself included; none: all before it."""
    rotary: Rotary | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Architecture:
    """A decoder-only transformer. Sizes are those of the whole model, not of a tensor-parallel rank."""

    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    kinds: tuple[AttentionKind, ...]
    layer_kinds: tuple[int, ...]
    """For each layer, its place in `kinds`."""
    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_offset: float = 0.0
    """Added to the weights of RMS norms: Gemma keeps them around 0."""
    norm_in_float32: bool = False
    """The weight is multiplied in before rounding (Gemma), not after (Llama)."""
    block: Block = "sequential"
    activation: Activation = "silu"
    qkv_order: QKVOrder = "stacked"
    transposed: bool = False
    """Weights of the layers are stored [in, out] (GPT-2's Conv1D)."""
    position_offset: int = 0
    """Row of the first position in a learned table."""
    max_positions: int | None = None
    """Longest sequence a learned table has rows for; none: no limit of the layout."""
    alibi: Tensor | None = None
    """[heads] slopes (arXiv 2108.12409): slope times the key's position is added to the scores; none: nothing is."""
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
        """How many."""
        return len(self.layer_kinds)
