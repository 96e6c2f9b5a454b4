"""A causal LM described by numbers: all that the decoder and its weights need to know of it.

Why data: model families differ in a dozen choices (norm, positions, heads, MLP, soft caps). `hugging_face.py` reads
them once from a Hugging Face model; the decoder and its weights follow them and name no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from hybrid_rlhf.generation.architecture.recurrence import Recurrence

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Block = Literal["sequential", "parallel", "post_norm", "normed", "single"]
"""Order of norms, attention and MLP; normed: what is added to is the norm of the residual stream (MiniMax); single: a
layer has one of attention, recurrence and MLP (Nemotron-H)."""
QKVOrder = Literal["stacked", "grouped"]
"""Rows of a fused QKV weight: stacked, all of Q, then K, then V; grouped, per KV head its queries, key and value."""

QKNorm = Literal["shared", "per_head", "over_heads"]
"""Norms of queries and keys: each head with the same weights, each with its own (Cohere), or all heads together (OLMo
2)."""


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
    chunked: bool = False
    """The window does not slide: it begins at the last multiple of its size (Llama 4)."""
    rotary: Rotary | None = None
    unit_qk: bool = False
    """Queries and keys are divided by their root mean square, which rotation leaves as it is (Llama 4)."""
    temperature_scale: float = 0.0
    """Queries at position p are multiplied by 1 + temperature_scale * log(1 + floor((p + 1) / temperature_tokens))
    (arXiv 2501.19399, as in Llama 4)."""
    temperature_tokens: int = 1
    kv_heads: int | None = None
    """None: those of the model."""
    head_dim: int | None = None
    """None: that of the model."""


@dataclass(frozen=True)
class Latent:
    """Keys and values that come from one latent per token (DeepSeek-V2). The cache holds it as one KV head, of
    `rotated_dims` + `size` dimensions, which are both key and value."""

    size: int
    rotated_dims: int
    """Of queries and of a key that all heads share."""
    plain_dims: int
    """Of queries and keys, besides."""
    value_dims: int
    norm_eps: float

    @property
    def query_dims(self) -> int:
        """Of the query and the key of a head."""
        return self.rotated_dims + self.plain_dims

    def expands(self, start: int, length: int) -> bool:
        """Whether a chunk of a sequence takes fewer multiplications in the plain form than in the absorbed one.

        Expanding the latent of a new token costs what the products with its query and its result cost, so the latents
        of the `start` tokens before the chunk count against what each pair of a query and a key saves. Values must fit
        in the size of keys.
        """
        pairs = length * start + length * (length + 1) // 2
        saved = pairs * (2 * self.size - self.plain_dims - self.value_dims)
        return self.value_dims <= self.query_dims and saved > start * self.size * (self.plain_dims + self.value_dims)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP of some layers."""

    count: int
    per_token: int
    router: Literal["softmax", "softmax_of_chosen", "sigmoid", "sigmoid_of_chosen", "sparsemixer"] = "softmax"
    """Weights of the chosen experts: their part of the softmax of all, the softmax of theirs alone, sigmoids, or each
    one's part of the softmax of those near it that are left (Phi-MoE). Those `of_chosen` are chosen by their logits."""
    weighs_inputs: bool = False
    """The weights multiply what goes into an expert, not what comes out (Llama 4)."""
    near: float = 0.0
    """Sparsemixer: a logit is near the best if it is below it by at most this share of the larger of both."""
    normalise: bool = False
    """The weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """The weights of the chosen experts are multiplied by it."""
    groups: int = 1
    """Experts are chosen from the best `chosen_groups` of so many groups."""
    chosen_groups: int = 1
    group_scores: int = 2
    """A group is as good as the sum of so many of its best scores."""
    shared_size: int = 0
    """Inner units of the experts that every token uses; 0: none."""
    beside_mlp: bool = False
    """The layer has its MLP too: both read the residual stream, each through a norm of its own, and are normed before
    they are added (Gemma 4)."""
    clamp: float | None = None
    """Gate and up are clamped to it, and the activation is (up + 1) gate sigmoid(1.702 gate) (gpt-oss)."""
    transposed: bool = False
    """Weights of the experts are stored [in, out] (gpt-oss)."""
    alternating: bool = False
    """Gate and up alternate in the stored weights (gpt-oss), they are not one after the other."""

    @property
    def index_dtype(self) -> torch.dtype:
        """The smallest type that holds the index of an expert, and -1."""
        return torch.int8 if self.count <= 128 else torch.int16

    @property
    def weighs_any_choice(self) -> bool:
        """Whether the router has a weight for every choice of experts: SparseMixer weighs those near its own best, and
        DeepSeek-V2 those in its own groups; the others are 0."""
        return self.router != "sparsemixer" and not (self.router == "softmax" and self.groups > 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelDescription:
    """A decoder-only transformer. Sizes are those of the whole model, not of a tensor-parallel rank."""

    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    """Both of the kind of attention with the widest keys, if kinds differ."""
    mlp_size: int
    kinds: tuple[AttentionKind, ...]
    layer_kinds: tuple[int | None, ...]
    """For each layer, its index in `kinds`; none: it has no attention."""
    kv_sources: Mapping[int, int] = field(default_factory=dict)
    """Layers that attend to the keys and values of an earlier one, and that one (Gemma 4)."""
    recurrence: Recurrence | None = None
    recurrent_layers: frozenset[int] = frozenset()
    """Layers with a recurrence, in place of attention or beside it."""
    recurrent_activation: Activation | None = None
    """Of recurrent layers; none: that of the MLP."""
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
    """Rotary positions rotate neighbouring dimensions of a head, not its halves; the rows of Q and K are reordered."""
    qk_norm: QKNorm = "shared"
    normed_values: bool = False
    """The values of each head are normed, without a weight (Gemma 4)."""
    residual_scale: float = 1.0
    """What attention and MLP add to the residual stream is multiplied by it (Granite)."""
    carried: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """In a normed block, what attention, recurrence and MLP are added to is multiplied by these."""
    gated_mlp: bool = True
    """The MLP has a gate."""
    mlp_sizes: Mapping[int, int] = field(default_factory=dict)
    """Layers whose MLP has another size than `mlp_size`."""
    layer_input_size: int = 0
    """Dimensions of what each layer adds of the token and its embedding, besides the residual stream (Gemma 4's
    per-layer embeddings); 0: none."""
    layer_scales: Mapping[int, Tensor] = field(default_factory=dict)
    """For some layers [1], which the residual stream behind them is multiplied by; training leaves it."""
    transposed: bool = False
    """Weights of the layers are stored [in, out] (GPT-2's Conv1D)."""
    position_offset: int = 0
    """Row of the first position in the table of learned positions."""
    max_positions: int | None = None
    """Rows of the table of learned positions, or where longrope takes other factors; none: no limit."""
    trained_positions: int | None = None
    """Longest sequence that the model was trained for, where it computes positions; none: unknown."""
    alibi: Tensor | None = None
    """[heads] ALiBi slopes (arXiv 2108.12409): slope times the key's position is added to scores; none: no ALiBi."""
    alibi_scale: float = 1.0
    """The bias is multiplied by it (Falcon scales it like the scores)."""
    alibi_bfloat16: bool = False
    """The bias is rounded to bfloat16 before scaling, as Falcon computes it."""
    experts: Experts | None = None
    expert_layers: frozenset[int] = frozenset()
    """Layers with a mixture of experts."""
    router_corrections: Mapping[int, Tensor] = field(default_factory=dict)
    """For some of these layers [experts], added to the scores by which experts are chosen; training leaves them."""
    attention_softcap: float | None = None
    latent: Latent | None = None
    gated_attention: bool = False
    """What each head attends to is multiplied by the sigmoid of a gate, stored with its query (Qwen3-Next)."""
    weight_scales: Mapping[str, float | Tensor] = field(default_factory=dict)
    """Weights and biases that are multiplied when they are loaded, all rows alike or each by its own (Falcon-H1)."""
    sinks: bool = False
    """Each head has the score of a key without a value (gpt-oss)."""
    final_softcap: float | None = None
    logit_scale: float = 1.0
    embed_scale: float = 1.0

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
    def cached_layers(self) -> list[int]:
        """Layers with keys and values of their own."""
        return [i for i, kind in enumerate(self.layer_kinds) if kind is not None and i not in self.kv_sources]

    def kv_size(self, kind: int) -> tuple[int, int]:
        """KV heads of a kind of attention, and dimensions of each."""
        own = self.kinds[kind]
        return own.kv_heads or self.kv_heads, own.head_dim or self.head_dim

    def attention_of(self, layer: int) -> int:
        """The index in `kinds` of a layer with attention."""
        kind = self.layer_kinds[layer]
        assert kind is not None
        return kind
