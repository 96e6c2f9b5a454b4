"""A causal LM described by numbers: everything that the decoder and its weights need to know.

Why data: model families differ in a dozen choices (norm, positions, heads, MLP, soft caps). `hugging_face.py` reads
them once from a Hugging Face model; the decoder and its weights follow them and name no family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.architecture.recurrence import Recurrence

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Block = Literal["sequential", "parallel", "post_norm", "normed", "single"]
"""Order of norms, attention and MLP. normed: outputs are added to the normed residual stream (MiniMax); single: a layer
has only one of attention, recurrence and MLP (Nemotron-H)."""
QKVOrder = Literal["stacked", "grouped"]
"""Row order of a fused QKV weight. stacked: all of Q, then K, then V; grouped: per KV head, its queries, key and
value."""

QKNorm = Literal["shared", "per_head", "over_heads"]
"""Norms of queries and keys. shared: each head is normed with the same weights; per_head: each has its own weights
(Cohere); over_heads: one norm over all heads together (OLMo 2)."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions (arXiv 2104.09864) over the first 2 * len(inv_freq) dimensions of a head, halves rotated."""

    inv_freq: Tensor
    """[R / 2] float32 frequencies, in radians per position."""
    scaling: float = 1.0
    """Factor of cosines and sines (YaRN)."""
    axes: Tensor | None = None
    """[R / 2] int64, the axis (time, height, width) of the position by which each frequency rotates tokens of images;
    none: tokens have one position."""


@dataclass(frozen=True, eq=False)
class AttentionKind:
    """Attention settings in which layers of one model may differ."""

    scale: float
    """Factor of the attention scores."""
    window: int | None = None
    """Number of tokens a query attends to, including itself; none: all tokens up to itself."""
    chunked: bool = False
    """The window begins at the last multiple of its size instead of sliding (Llama 4)."""
    rotary: Rotary | None = None
    unit_qk: bool = False
    """Queries and keys are divided by their root mean square, which rotation does not change (Llama 4)."""
    temperature_scale: float = 0.0
    """Queries at position p are multiplied by 1 + temperature_scale * log(1 + floor((p + 1) / temperature_tokens))
    (arXiv 2501.19399, as in Llama 4)."""
    temperature_tokens: int = 1
    kv_heads: int | None = None
    """None: the number of the model."""
    head_dim: int | None = None
    """None: the size of the model."""


@dataclass(frozen=True)
class Latent:
    """Keys and values computed from one latent per token (DeepSeek-V2). The cache stores the latent as one KV head of
    `rotated_dims` + `size` dimensions, which serves as key and value."""

    size: int
    rotated_dims: int
    """Rotated dimensions of queries, and of the key part that all heads share."""
    plain_dims: int
    """Dimensions of queries and keys that are not rotated."""
    value_dims: int
    norm_eps: float

    @property
    def query_dims(self) -> int:
        """Number of dimensions of a head's query, and of its key."""
        return self.rotated_dims + self.plain_dims

    def expands(self, start: int, length: int) -> bool:
        """True if a chunk of a sequence takes fewer multiplications in the plain form than in the absorbed form.

        The chunk has `length` tokens, after `start` earlier ones. Expanding the latent of a new token costs as much as
        the absorbed form's products with its query and its result. The plain form therefore pays off if the saving per
        pair of query and key exceeds the cost of expanding the latents of the earlier tokens. It requires values no
        larger than keys.
        """
        pairs = length * start + length * (length + 1) // 2
        saved = pairs * (2 * self.size - self.plain_dims - self.value_dims)
        return self.value_dims <= self.query_dims and saved > start * self.size * (self.plain_dims + self.value_dims)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts, which replaces the MLP of some layers."""

    count: int
    per_token: int
    router: Literal["softmax", "softmax_of_chosen", "sigmoid", "sigmoid_of_chosen", "sparsemixer"] = "softmax"
    """Weights of the chosen experts. softmax: their entries in the softmax over all experts; softmax_of_chosen: the
    softmax over their logits; sigmoid, sigmoid_of_chosen: sigmoids of their logits; sparsemixer: the entry of each in
    the softmax over the remaining experts near it (Phi-MoE). With `of_chosen`, experts are chosen by logits."""
    weighs_inputs: bool = False
    """The weights multiply the inputs of an expert, not its outputs (Llama 4)."""
    near: float = 0.0
    """SparseMixer: a logit is near the best one if it is lower by at most this fraction of max(|logit|, best)."""
    normalise: bool = False
    """The weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights of the chosen experts."""
    groups: int = 1
    """Number of groups of experts. Experts are chosen from the best `chosen_groups` of them."""
    chosen_groups: int = 1
    group_scores: int = 2
    """A group's score is the sum of this many of its best scores."""
    shared_size: int = 0
    """Intermediate size of the shared experts, which every token uses; 0: none."""
    beside_mlp: bool = False
    """The layer also has an MLP. Both read the residual stream through separate norms, and both outputs are normed
    before they are added (Gemma 4)."""
    clamp: float | None = None
    """Gate and up are clamped to this value, and the activation is (up + 1) gate sigmoid(1.702 gate) (gpt-oss)."""
    transposed: bool = False
    """Weights of the experts are stored [in, out] (gpt-oss)."""
    alternating: bool = False
    """Units of gate and up alternate in the stored weights (gpt-oss), instead of all of gate before all of up."""

    @property
    def index_dtype(self) -> torch.dtype:
        """Smallest integer dtype that represents all expert indices and -1."""
        return torch.int8 if self.count <= 128 else torch.int16

    @property
    def weighs_any_choice(self) -> bool:
        """True if the router gives a nonzero weight to any choice of experts. SparseMixer gives 0 to experts far from
        its best one, and DeepSeek-V2 gives 0 to experts outside the groups it chose."""
        return self.router != "sparsemixer" and not (self.router == "softmax" and self.groups > 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelDescription:
    """A decoder-only transformer. Sizes are those of the whole model, not of a tensor-parallel rank."""

    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    """If kinds of attention differ, `kv_heads` and `head_dim` are those of the kind with the widest keys."""
    mlp_size: int
    kinds: tuple[AttentionKind, ...]
    layer_kinds: tuple[int | None, ...]
    """For each layer, the index of its attention in `kinds`; none: it has no attention."""
    kv_sources: Mapping[int, int] = field(default_factory=dict)
    """For each layer that attends to the keys and values of an earlier layer, the index of that layer (Gemma 4)."""
    recurrence: Recurrence | None = None
    recurrent_layers: frozenset[int] = frozenset()
    """Layers with a recurrence, in place of attention or beside it."""
    recurrent_activation: Activation | None = None
    """Activation of recurrent layers; none: that of the MLP."""
    norm: NormKind
    norm_eps: float
    norm_offset: float = 0.0
    """Added to the weights of RMS norms: Gemma stores them minus 1."""
    norm_in_float32: bool = False
    """The norm is multiplied by its weight before rounding (Gemma), not after (Llama)."""
    block: Block = "sequential"
    activation: Activation = "silu"
    qkv_order: QKVOrder = "stacked"
    interleaved_rotary: bool = False
    """Rotary positions rotate neighbouring dimensions of a head, not its halves; rows of Q and K are reordered at
    loading."""
    qk_norm: QKNorm = "shared"
    normed_values: bool = False
    """The values of each head are normed, without a weight (Gemma 4)."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream (Granite)."""
    carried: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Factors of the normed stream in a normed block before attention, recurrence and MLP are added to it."""
    gated_mlp: bool = True
    """The MLP has a gate."""
    mlp_sizes: Mapping[int, int] = field(default_factory=dict)
    """MLP sizes of the layers where it is not `mlp_size`."""
    layer_input_size: int = 0
    """Size of the per-layer embeddings, computed from a token and its embedding, that each layer reads besides the
    residual stream (Gemma 4); 0: none."""
    layer_scales: Mapping[int, Tensor] = field(default_factory=dict)
    """For some layers, a factor [1] of the residual stream after the layer; not trained."""
    transposed: bool = False
    """Weights of the layers are stored [in, out] (GPT-2's Conv1D)."""
    position_offset: int = 0
    """Row of the first position in the table of learned positions."""
    max_positions: int | None = None
    """Rows of the table of learned positions, or the length at which longrope changes its factors; none: no limit."""
    trained_positions: int | None = None
    """Longest sequence that the model was trained for, if it computes positions; none: unknown."""
    alibi: Tensor | None = None
    """[heads] ALiBi slopes (arXiv 2108.12409): slope times the key's position is added to scores; none: no ALiBi."""
    alibi_scale: float = 1.0
    """Factor of the bias (Falcon scales it like the scores)."""
    alibi_bfloat16: bool = False
    """The bias is rounded to bfloat16 before scaling, as Falcon computes it."""
    experts: Experts | None = None
    expert_layers: frozenset[int] = frozenset()
    """Layers with a mixture of experts."""
    router_corrections: Mapping[int, Tensor] = field(default_factory=dict)
    """For some of these layers, terms [experts] added to the scores by which experts are chosen; not trained."""
    attention_softcap: float | None = None
    latent: Latent | None = None
    gated_attention: bool = False
    """The output of each head is multiplied by the sigmoid of a gate, stored with its query (Qwen3-Next)."""
    weight_scales: Mapping[str, float | Tensor] = field(default_factory=dict)
    """Factors of weights and biases at loading, one for all rows or one per row (Falcon-H1)."""
    sinks: bool = False
    """Each head has an attention sink: the score of a key without a value (gpt-oss)."""
    final_softcap: float | None = None
    logit_scale: float = 1.0
    embed_scale: float = 1.0
    banned_ids: tuple[int, ...] = ()
    """Tokens with probability 0: placeholders of images and videos."""

    def __post_init__(self) -> None:
        choices = {"norm": NormKind, "block": Block, "qkv_order": QKVOrder, "qk_norm": QKNorm, "activation": Activation}
        for name, choice in choices.items():
            if (value := getattr(self, name)) not in get_args(choice):
                raise ValueError(f"{name} is one of {', '.join(get_args(choice))}, got {value}")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layer_kinds)

    @property
    def has_axes(self) -> bool:
        """True if tokens of images have three positions."""
        return any(kind.rotary is not None and kind.rotary.axes is not None for kind in self.kinds)

    @property
    def cached_layers(self) -> list[int]:
        """Indices of the layers that store keys and values in the cache."""
        return [i for i, kind in enumerate(self.layer_kinds) if kind is not None and i not in self.kv_sources]

    def kv_size(self, kind: int) -> tuple[int, int]:
        """Number of KV heads of a kind of attention, and their head size."""
        attention = self.kinds[kind]
        return attention.kv_heads or self.kv_heads, attention.head_dim or self.head_dim

    def attention_of(self, layer: int) -> int:
        """Index in `kinds` of the attention of a layer, which must have one."""
        kind = self.layer_kinds[layer]
        assert kind is not None
        return kind


@dataclass(frozen=True)
class Split:
    """The part of a model that one tensor-parallel rank computes."""

    heads: range
    kv_heads: range
    kv_heads_of: tuple[tuple[int, ...], ...]
    """For each kind of attention, the KV heads of this rank."""
    mlp: range
    vocabulary: range
    experts: range = range(0)
    """Routed experts; each is on one rank."""
    shared_mlp: range = range(0)
    """Units of the shared experts."""
    recurrent: range = range(0)
    """Units of the recurrent layers."""

    @classmethod
    def of(cls, architecture: ModelDescription, rank: int, size: int) -> Split:
        """Return the part of a rank: whole KV heads if there are enough, else each KV head on several ranks.

        Raises:
            UserError: when the heads cannot be split.
        """
        queries, kv = _share_heads(architecture.heads, architecture.kv_heads, rank, size)
        counts = [architecture.kv_size(kind)[0] for kind in range(len(architecture.kinds))]
        _require_same_heads(architecture.heads, {architecture.kv_heads, *counts}, size)
        experts = architecture.experts
        units = architecture.recurrence.units if architecture.recurrence else 0
        if 0 < units < size:
            raise UserError(
                f"tensor parallelism must give each rank whole groups of heads of recurrent layers, {size} ranks are "
                f"more than the {units} of this model: use {units} or fewer"
            )
        return cls(
            queries,
            kv,
            tuple(tuple(_share_heads(architecture.heads, count, rank, size)[1]) for count in counts),
            share(architecture.mlp_size, rank, size),
            share(architecture.vocab_size, rank, size),
            share(experts.count if experts else 0, rank, size),
            share(experts.shared_size if experts else 0, rank, size),
            share(units, rank, size),
        )


def _share_heads(heads: int, kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """Return the heads and the KV heads of a rank."""
    per_kv = heads // kv_heads
    if size <= kv_heads:
        kv = share(kv_heads, rank, size)
        return range(kv.start * per_kv, kv.stop * per_kv), kv
    if size % kv_heads == 0 and heads % size == 0:
        return share(heads, rank, size), range(rank * kv_heads // size, rank * kv_heads // size + 1)
    raise UserError(
        f"tensor parallelism must split {heads} heads with {kv_heads} KV heads, {size} ranks cannot: "
        f"use {kv_heads} ranks or fewer"
    )


def _require_same_heads(heads: int, counts: set[int], size: int) -> None:
    """Raise UserError unless each rank has the same heads with every number of KV heads."""
    for rank in range(size):
        if len({_share_heads(heads, count, rank, size)[0] for count in counts}) > 1:
            raise UserError(
                f"tensor parallelism must give a rank the same heads in all layers, {size} ranks do not with "
                f"{' and '.join(map(str, sorted(counts)))} KV heads: use a divisor of {math.gcd(*counts)}"
            )


def share(total: int, rank: int, size: int) -> range:
    """Return a rank's contiguous share of `total` items; shares differ by at most one item."""
    return range(total * rank // size, total * (rank + 1) // size)
