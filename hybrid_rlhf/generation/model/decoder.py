"""The forward pass of the inference weights, over the tokens of many sequences in one flat batch.

Why flat: matrix products over the tokens of all sequences need no padding, and prefill and decoding share one code
path. Only attention (attention.py) and recurrent layers (recurrent/) know which tokens belong to which sequence.

Shapes: T tokens, H hidden, A heads and K KV heads of this rank, D head size, I dimensions of a layer's input, V
rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation.architecture.model_description import ModelDescription, Split
from hybrid_rlhf.generation.model.adapters import AdaptedLinear, ChosenAdapters, LowRankChange
from hybrid_rlhf.generation.model.attention import Attention, Chunks, DecodeRows, StepAttention, Table
from hybrid_rlhf.generation.model.cache import CacheLayout, KVCache, token_bytes
from hybrid_rlhf.generation.model.experts import RoutedExperts
from hybrid_rlhf.generation.model.images import ImageTokens
from hybrid_rlhf.generation.model.latent import LatentAttention
from hybrid_rlhf.generation.model.layers import (
    HeadNorm,
    InferenceLinear,
    Linear,
    Norm,
    QuantisedLinear,
    SplitNorm,
    norm_heads,
    operations,
    weight_bytes,
)
from hybrid_rlhf.generation.model.recurrent.mixers import Mixer
from hybrid_rlhf.generation.model.recurrent.states import StateCache, StepStates, state_bytes
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops.rows import ACTIVATIONS
from hybrid_rlhf.runtime.world import World

Sublayer = Callable[[Tensor], Tensor]
"""Attention of a layer, from [T, H] to [T, H]."""
Places = tuple[Table, Tensor | None]
"""Effect of token positions in layers of one kind: rotation of queries and keys, and factors of queries [T, 1, 1]
float32 (none: 1)."""
MLP = Callable[[Tensor, Tensor], Tensor]
"""MLP and experts of a layer, from the normed residual stream [T, H] and the stream itself to [T, H]."""

LAYER_NORMS = (
    *("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm", "input_out_norm"),
    *("dense_out_norm", "experts_norm", "experts_out_norm", "router_norm"),
)
HEAD_NORMS = ("q_norm", "k_norm")
LAYER_PRODUCTS = ("qkv", "o", "up", "down", "input_gate", "input_out")
"""Products of a layer that support adapters; those of latent attention, recurrent layers and experts do not."""


@dataclass
class LayerWeights:
    """Weights of one layer. Parts that the family lacks are None."""

    attention_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    dense_out_norm: Norm | None
    experts_norm: Norm | None
    experts_out_norm: Norm | None
    router_norm: Norm | None
    """Norms of a layer with `Experts.beside_mlp`: MLP output, expert input, expert output, and router input."""
    q_norm: Norm | HeadNorm | SplitNorm | None
    k_norm: Norm | HeadNorm | SplitNorm | None
    v_norm: Norm | None
    """Norm of values, which has no trained weight."""
    qkv: Linear | None
    """Fused product; only queries in a layer that attends to the keys of another one."""
    latent: LatentAttention | None
    """Latent attention, in place of `qkv`."""
    o: Linear | None
    recurrent: Mixer[Any] | None
    """Recurrent layer, in place of attention or beside it."""
    up: Linear | None
    down: Linear | None
    """The MLP, or the shared experts of a layer with a mixture; if it is gated, `up` is gate and up fused."""
    experts: RoutedExperts | None
    sinks: Tensor | None
    """[A] attention sinks (StepAttention)."""
    shared_router: Tensor | None
    """[1, H]; the sigmoid of its product with the input weighs the shared experts (Qwen2-MoE)."""
    input_gate: Linear | None
    input_out: Linear | None
    input_out_norm: Norm | None
    """Products and norm of the per-layer input (LayerInputs)."""
    scale: Tensor | None
    """[1], factor of the residual stream after the layer."""

    @property
    def products(self) -> dict[str, Linear]:
        """Products of the layer that may be packed or quantised, by name, without those of experts."""
        products = {name: getattr(self, name) for name in LAYER_PRODUCTS}
        products |= {} if self.latent is None else self.latent.products
        mixer = None if self.recurrent is None else self.recurrent.weights
        products |= {} if mixer is None else {"in": mixer.project, "out": mixer.out}
        return {name: product for name, product in products.items() if product is not None}


@dataclass
class LayerInputs:
    """Weights of the per-layer inputs: a second embedding, and a projection of the first (Gemma 4)."""

    embed: Tensor
    """[rows of the vocabulary on this rank, layers * layer_input_size]."""
    project: InferenceLinear
    norm: Norm


@dataclass
class DecoderWeights:
    """Every tensor of a rank's decoder, filled by `InferenceWeights` (weights/)."""

    embed: Tensor
    """[rows of the vocabulary on this rank, H]."""
    positions: Tensor | None
    embed_norm: Norm | None
    embed_in: Tensor | None
    embed_out: Tensor | None
    layer_inputs: LayerInputs | None
    layers: list[LayerWeights]
    final_norm: Norm | None
    head: InferenceLinear


class AttentionCost(NamedTuple):
    """What a query costs for each key that it attends to, on a rank."""

    bytes: int = 0
    operations: int = 0


class Decoder:
    """A causal LM on one tensor-parallel rank."""

    def __init__(self, architecture: ModelDescription, weights: DecoderWeights, split: Split, world: World) -> None:
        self.architecture = architecture
        self.split = split
        self.world = world
        self._activation = ACTIVATIONS[architecture.activation]
        self.kernels = choice.kernels_for(world.device, weights.embed.dtype)
        self._fused = choice.fused_kernels(self.kernels)
        self._weights = weights
        self._chosen: ChosenAdapters | None = None
        self._bases: list[tuple[LayerWeights, str, Linear]] = []
        """Products without their adapters, for each that has some."""
        # as Hugging Face, which multiplies by the scale in the dtype of the weights
        self._embed_scale = float(torch.tensor(architecture.embed_scale, dtype=weights.embed.dtype))
        self._input_scale = float(torch.tensor(architecture.layer_input_size**0.5, dtype=weights.embed.dtype))
        self._inv_freq = [
            None if kind.rotary is None else kind.rotary.inv_freq.to(world.device) for kind in architecture.kinds
        ]
        self._axes = [
            None if kind.rotary is None or kind.rotary.axes is None else kind.rotary.axes.to(world.device)
            for kind in architecture.kinds
        ]
        banned = [token - split.vocabulary.start for token in architecture.banned_ids if token in split.vocabulary]
        self._banned = torch.tensor(banned, device=world.device) if banned else None
        """[n] int64, columns of this rank's logits that are excluded; none: there are none."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, KV cache and activations."""
        return self._weights.embed.dtype

    @property
    def product_bytes(self) -> int:
        """Bytes of the matrices that a decoding step reads, for any number of rows; all experts count, as in a step of
        many tokens."""
        layers = self._weights.layers
        latents = sum(layer.latent.kv_up.nbytes for layer in layers if layer.latent is not None)
        experts = sum(layer.experts.weight_bytes for layer in layers if layer.experts is not None)
        # without the padding of packed weights
        return experts + latents + sum(map(weight_bytes, self._products))

    @property
    def token_operations(self) -> float:
        """Floating-point operations of the products of one token, with the experts that it passes through. A GPU takes
        half the time for those of 8 bits, which count half."""
        layers = self._weights.layers
        latents = sum(2 * layer.latent.kv_up.numel() for layer in layers if layer.latent is not None)
        kind = self.architecture.experts
        share = 0.0 if kind is None else kind.per_token / kind.count
        mixtures = [layer.experts for layer in layers if layer.experts is not None]
        experts = sum(2 * mixture.router.numel() + share * mixture.operations for mixture in mixtures)
        return experts + latents + sum(map(operations, self._products))

    @property
    def attention_costs(self) -> dict[int | None, AttentionCost]:
        """Costs of attention in all layers with the same window; None: those without one."""
        a = self.architecture
        costs = dict[int | None, AttentionCost]()
        for layer, kind in enumerate(a.layer_kinds):
            if kind is not None:
                keys = a.kv_size(kind)[1]
                values = keys if a.latent is None else a.latent.size
                before = costs.get(a.kinds[kind].window, AttentionCost())
                costs[a.kinds[kind].window] = AttentionCost(
                    before.bytes + token_bytes(a, self.split, self.dtype, layer=layer),
                    before.operations + 2 * len(self.split.heads) * (keys + values),
                )
        return costs

    @property
    def _products(self) -> list[Linear]:
        """Products of every token, without those of experts."""
        weights = self._weights
        products = [product for layer in weights.layers for product in layer.products.values()]
        return [*products, weights.head, *([] if weights.layer_inputs is None else [weights.layer_inputs.project])]

    @property
    def state_bytes(self) -> int:
        """Bytes per row of the states of recurrent layers."""
        a = self.architecture
        if a.recurrence is None:
            return 0
        units = len(self.split.recurrent)
        return state_bytes(a.recurrence, layers=len(a.recurrent_layers), units=units, dtype=self.dtype)

    def new_cache(self, layout: CacheLayout, *, pages: int) -> KVCache:
        """Allocate a KV cache."""
        return KVCache(layout, pages=pages, dtype=self.dtype, device=self.world.device)

    def new_states(self, slots: int) -> StateCache | None:
        """Allocate zero states; None for a model without recurrent layers."""
        a = self.architecture
        if a.recurrence is None:
            return None
        return StateCache(
            a,
            a.recurrence,
            units=len(self.split.recurrent),
            slots=slots,
            dtype=self.dtype,
            device=self.world.device,
            kernels=self._fused,
        )

    @property
    def has_adapters(self) -> bool:
        """True if tokens may have adapters."""
        return self._chosen is not None

    def set_adapters(self, changes: Mapping[tuple[int, str], Sequence[LowRankChange]]) -> None:
        """Replace all adapters by changes of products, which are given by layer and name. `hidden` selects adapters by
        token."""
        for weights, name, base in self._bases:
            setattr(weights, name, base)
        self._bases.clear()
        self._chosen = ChosenAdapters()
        for (layer, name), layer_changes in changes.items():
            weights = self._weights.layers[layer]
            base = getattr(weights, name)
            self._bases.append((weights, name, base))
            setattr(weights, name, AdaptedLinear(base, layer_changes, self._chosen))

    @property
    def quantisation_errors(self) -> dict[str, Tensor]:
        """Relative error (a scalar tensor) of each quantised product, by its description; empty if none is
        quantised."""
        return {
            f"{name} of layer {index}": product.error
            for index, w in enumerate(self._weights.layers)
            for name, product in (w.products | ({} if w.experts is None else w.experts.products)).items()
            if isinstance(product, QuantisedLinear)
        }

    def refresh(self) -> None:
        """Recompute tensors derived from weights, after the weights were updated in place."""
        weights = self._weights
        inputs = weights.layer_inputs
        norms = [weights.embed_norm, weights.final_norm, None if inputs is None else inputs.norm]
        norms += [getattr(layer, name) for layer in weights.layers for name in (*LAYER_NORMS, *HEAD_NORMS)]
        for part in (*norms, *(layer.latent for layer in weights.layers)):
            if isinstance(part, Norm | LatentAttention):
                part.refresh()

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        *,
        states: StateCache | None,
        rows: DecodeRows | None = None,
        chunks: Chunks | None = None,
        adapters: Tensor | None = None,
        observe: Callable[[Tensor], None] | None = None,
        rotated: Tensor | None = None,
        images: ImageTokens | None = None,
    ) -> Tensor:
        """Return the last hidden states [T, H] of tokens [T] at positions [T], before the final norm.

        Args:
            tokens: token ids, those of the rows first, then those of each chunk.
            positions: positions in their sequences.
            attention: attention over a cache, which takes the keys, values and routes of the tokens.
            states: states of recurrent layers; None without such layers.
            rows: sequences that decode, if any.
            chunks: parts of prompts, if any.
            adapters: [T] adapter numbers, 0 for a token without one; none: no token has one.
            observe: called with the hidden states before the first layer and after each layer.
            rotated: positions of rotation, [T], or [T, 3] if they have three axes; none: `positions`.
            images: image tokens, if any.
        """
        cache = attention.cache
        attend = attention.step(rows, chunks)
        step_states = None if states is None else states.step(rows, chunks)
        routes: list[Tensor] | None = None if cache.routes is None else []
        if self._chosen is not None:
            self._chosen.of_tokens = adapters
        x = self._embed(tokens, positions)
        if images is not None:
            x = x.index_copy(0, images.index, images.states.to(x.dtype))
        if observe is not None:
            observe(x)
        inputs = self._layer_inputs(tokens, x)
        turned = positions if rotated is None else rotated
        places = [self._places(kind, positions, turned) for kind in range(len(self.architecture.kinds))]
        block = getattr(self, f"_{self.architecture.block}")
        for index, layer in enumerate(self._weights.layers):
            kind = self.architecture.layer_kinds[index]
            place = None if kind is None else places[kind]
            x = block(
                x,
                layer,
                lambda h, i=index, w=layer, p=place: self._mixed(h, i, w, p, attend, step_states),
                lambda h, x, w=layer: self._mlp(h, x, w, routes),
            )
            if inputs is not None:
                x = x + self._of_input(x, inputs[:, index], layer)
            if layer.scale is not None:
                x = x * layer.scale
            if observe is not None:
                observe(x)
            if images is not None and index < len(images.deep):
                x = x.index_add(0, images.index, images.deep[index].to(x.dtype))
        if routes:
            cache.write_routes(attend.places[0], routes)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [T, V] float32 for hidden states [T, H]; -inf for banned tokens."""
        weights = self._weights
        a = self.architecture
        x = _normed(weights.final_norm, hidden)
        if weights.embed_out is not None:
            x = functional.linear(x, weights.embed_out)
        logits = weights.head(x).float()
        if a.logit_scale != 1.0:
            logits.mul_(a.logit_scale)
        if a.final_softcap is not None:
            logits.div_(a.final_softcap).tanh_().mul_(a.final_softcap)
        if self._banned is not None:
            logits.index_fill_(1, self._banned, -torch.inf)
        return logits

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        weights = self._weights
        a = self.architecture
        x = self._rows(weights.embed, tokens)
        if self._embed_scale != 1.0:
            x = x * self._embed_scale
        if weights.embed_in is not None:
            x = functional.linear(x, weights.embed_in)
        if weights.positions is not None:
            x = x + functional.embedding(positions + a.position_offset, weights.positions)
        return _normed(weights.embed_norm, x)

    def _rows(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Look up tokens [T] in a table that is split over ranks by vocabulary."""
        if self.world.size == 1:
            return functional.embedding(tokens, table)
        mine = self.split.vocabulary
        here = (tokens >= mine.start) & (tokens < mine.stop)
        return self.world.all_reduce(
            functional.embedding(torch.where(here, tokens - mine.start, 0), table) * here[:, None]
        )

    def _layer_inputs(self, tokens: Tensor, embedded: Tensor) -> Tensor | None:
        """Return per-layer inputs [T, layers, I] for tokens [T] and their embeddings [T, H]; None if the model has
        none."""
        weights = self._weights.layer_inputs
        a = self.architecture
        if weights is None:
            return None
        from_tokens = self._rows(weights.embed, tokens) * self._input_scale
        shared = (weights.project(embedded) * a.hidden_size**-0.5).unflatten(1, (a.layers, -1))
        return (weights.norm(shared) + from_tokens.view_as(shared)) * 0.5**0.5

    def _of_input(self, x: Tensor, layer_input: Tensor, w: LayerWeights) -> Tensor:
        """Return what a layer adds to the residual stream x for its input [T, I]. It is not divided over ranks."""
        assert w.input_gate is not None and w.input_out is not None
        return _normed(w.input_out_norm, w.input_out(self._activation(w.input_gate(x)) * layer_input))

    # -- block types: orders of norm, attention and MLP

    def _sequential(self, x: Tensor, w: LayerWeights, attention: Sublayer, mlp: MLP) -> Tensor:
        x, normed = _added(x, self._delta(attention(_normed(w.attention_norm, x)), w.attention_out_norm), w.mlp_norm)
        return x + self._delta(mlp(normed, x), w.mlp_out_norm)

    def _delta(self, mixed: Tensor, norm: Norm | None) -> Tensor:
        """Norm and scale the output of attention or MLP before it is added to the residual stream."""
        scale = self.architecture.residual_scale
        delta = _normed(norm, mixed)
        return delta if scale == 1.0 else delta * scale

    def _parallel(self, x: Tensor, w: LayerWeights, attention: Sublayer, mlp: MLP) -> Tensor:
        normed = _normed(w.attention_norm, x)
        return x + attention(normed) + mlp(normed if w.mlp_norm is None else w.mlp_norm(x), x)

    def _post_norm(self, x: Tensor, w: LayerWeights, attention: Sublayer, mlp: MLP) -> Tensor:
        _, x = _added(x, attention(x), w.attention_norm)
        return _added(x, mlp(x, x), w.mlp_norm)[1]

    def _normed(self, x: Tensor, w: LayerWeights, attention: Sublayer, mlp: MLP) -> Tensor:
        attended, recurrent, carried = self.architecture.carried
        normed = _normed(w.attention_norm, x)
        carried_in = normed * (attended if w.recurrent is None else recurrent)
        _, normed = _added(carried_in, attention(normed), w.mlp_norm)
        return normed * carried + mlp(normed, normed)

    def _single(self, x: Tensor, w: LayerWeights, attention: Sublayer, mlp: MLP) -> Tensor:
        normed = _normed(w.attention_norm, x)
        return x + (mlp(normed, x) if w.o is None and w.recurrent is None else attention(normed))

    def _mixed(
        self,
        x: Tensor,
        index: int,
        w: LayerWeights,
        places: Places | None,
        attend: StepAttention,
        states: StepStates | None,
    ) -> Tensor:
        """Mix tokens in a layer by attention, a recurrence, or the sum of both."""
        if w.recurrent is None:
            return self._attention(x, index, w, places, attend)
        assert states is not None
        mixed = self.world.all_reduce(w.recurrent(index, x, states))
        return mixed if w.o is None else mixed + self._attention(x, index, w, places, attend)

    def _attention(
        self, x: Tensor, index: int, w: LayerWeights, places: Places | None, attend: StepAttention
    ) -> Tensor:
        assert w.o is not None and places is not None
        table, query_scales = places
        if w.latent is not None:
            return self.world.all_reduce(w.o(w.latent(x, table, attend.latents(index))))
        assert w.qkv is not None
        a = self.architecture
        kind = self.architecture.attention_of(index)
        heads = len(self.split.heads)
        d = a.kv_size(kind)[1]
        kv_heads = 0 if index in a.kv_sources else len(self.split.kv_heads_of[kind])
        qkv = w.qkv(x).view(len(x), -1, d)
        gate = None
        if a.gated_attention:
            qkv, gate = qkv.split([heads + 2 * kv_heads, heads], dim=1)
        if w.q_norm is not None:
            qkv = norm_heads(qkv, w.q_norm, w.k_norm, w.v_norm, kv_heads=kv_heads)
        if query_scales is not None:
            qkv[:, :heads] *= query_scales
        mixed = attend(index, qkv, table, w.sinks)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return self.world.all_reduce(w.o(mixed.reshape(len(x), heads * d)))

    def _mlp(self, x: Tensor, stream: Tensor, w: LayerWeights, routes: list[Tensor] | None) -> Tensor:
        """Apply MLP and experts to the normed residual stream; experts beside an MLP read the stream itself."""
        activate = self._gate if self.architecture.gated_mlp else self._activation
        dense = None
        if w.up is not None and w.down is not None:
            dense = w.down(activate(w.up(x)))
            if w.shared_router is not None:
                dense = dense * functional.linear(x, w.shared_router).sigmoid()
        if w.experts is None:
            assert dense is not None
            return self.world.all_reduce(dense)
        mixed = w.experts(
            _normed(w.experts_norm, x if w.experts_norm is None else stream),
            activate,
            routed=None if w.router_norm is None else w.router_norm(stream),
            routes=routes,
            kernels=self._fused,
            activation=self.architecture.activation,
        )
        if w.experts_norm is None:
            return self.world.all_reduce(mixed if dense is None else dense + mixed)
        assert dense is not None
        summed = _normed(w.experts_out_norm, self.world.all_reduce(mixed))
        return _normed(w.dense_out_norm, self.world.all_reduce(dense)) + summed

    def _gate(self, both: Tensor) -> Tensor:
        """Return activation(gate) * up for gate and up [T, 2 I]."""
        if self._fused is not None:
            result: Tensor = self._fused.gated(both, self.architecture.activation)
            return result
        gate, up = both.chunk(2, dim=-1)
        return self._activation(gate) * up

    def _places(self, kind: int, positions: Tensor, rotated: Tensor) -> Places:
        attention_kind = self.architecture.kinds[kind]
        scales = None
        if attention_kind.temperature_scale:
            spans = torch.floor((positions.float() + 1.0) / attention_kind.temperature_tokens)
            scales = 1.0 + attention_kind.temperature_scale * torch.log1p(spans)[:, None, None]
        rotary = attention_kind.rotary
        inv_freq = self._inv_freq[kind]
        if rotary is None or inv_freq is None:
            return None, scales
        turned = rotated[:, None] if rotated.dim() == 1 else rotated[:, self._axes[kind]]
        angles = turned[:, None].float() * inv_freq
        cos, sin = angles.cos() * rotary.scaling, angles.sin() * rotary.scaling
        table = torch.cat([cos, cos], dim=-1).to(self.dtype), torch.cat([-sin, sin], dim=-1).to(self.dtype)
        return table, scales


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _added(x: Tensor, delta: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its norm."""
    if norm is None:
        x = x + delta
        return x, x
    return norm.after_adding(x, delta)
