"""Inference weights on one tensor-parallel rank, filled from named training weights.

Full weights arrive one by one, in any order, and each rank keeps its part. Models that are partitioned, on disk or with
adapters can therefore be streamed in buckets. Attention and MLP are split by heads and intermediate units, embeddings
and head by rows of the vocabulary (Megatron-LM, arXiv 1909.08053). A weight that needs no change stays a view of the
loaded tensor. Products with the same input (Q, K, V; gate, up; the latents of queries and of keys) are fused, without a
copy if they are adjacent in memory. `SharedWeights` follow the training of a model.

Shapes: N outputs, K inputs of a product; H hidden.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.architecture.hugging_face import SCORE_HEAD, NotDescribed, describe
from hybrid_rlhf.generation.architecture.model_description import Experts, Latent, ModelDescription, Split, share
from hybrid_rlhf.generation.architecture.recurrence import Recurrence
from hybrid_rlhf.generation.model.adapters import LowRankChange
from hybrid_rlhf.generation.model.decoder import (
    LAYER_NORMS,
    LAYER_PRODUCTS,
    Decoder,
    DecoderWeights,
    LayerInputs,
    LayerWeights,
)
from hybrid_rlhf.generation.model.experts import RoutedExperts
from hybrid_rlhf.generation.model.four_bit import FourBitLinear, FourBitPart
from hybrid_rlhf.generation.model.latent import LatentAttention
from hybrid_rlhf.generation.model.layers import HeadNorm, InferenceLinear, Linear, Norm, SplitNorm, product_maker
from hybrid_rlhf.generation.model.recurrent.mixers import Mixer, MixerWeights, mixer
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops.quantisation import Quantization
from hybrid_rlhf.generation.weights.adapters import NumberedAdapter, Place, adapter_changes
from hybrid_rlhf.generation.weights.picks import (
    Pick,
    Scaled,
    adjacent_view,
    after_transpose,
    all_of,
    columns_of,
    experts_of,
    fused_qkv,
    halves_of,
    listed,
    reordered,
    rows_of,
    same_storage,
)
from hybrid_rlhf.models.families import has_float32_logits, unread_weights
from hybrid_rlhf.models.four_bit import FourBitWeight
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World

PRODUCTS = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")


@dataclass(frozen=True)
class DescribedModel:
    """Everything needed to plan inference weights, also on a rank that does not have the model."""

    architecture: ModelDescription
    names: Mapping[str, str]
    """Module names of the family, by role."""
    parameters: tuple[str, ...]
    """Names of the weights; tied weights once."""
    unread: tuple[str, ...]
    """Weights that text does not use: those of image and audio towers."""
    float32_logits: bool

    @classmethod
    def of(cls, lm: PreTrainedModel, parameters: Iterable[str]) -> DescribedModel:
        """Describe a model, given the names of its weights, which may be partitioned.

        Raises:
            NotDescribed: when the family table does not cover the model.
        """
        named = tuple(parameters)
        return cls(*describe(lm), named, unread_weights(lm, named), has_float32_logits(lm))


DescribeModel = Callable[[PreTrainedModel, Iterable[str]], DescribedModel]
"""Describes a model, as `DescribedModel.of`."""


class InferenceWeights:
    """A model's inference weights on this rank: planned once, built each time the training weights have changed."""

    def __init__(
        self,
        model: DescribedModel,
        *,
        world: World,
        dtype: torch.dtype,
        in_place: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        """Plan the destination of each weight.

        Args:
            model: the model.
            world: the tensor-parallel ranks, and the device of this one.
            dtype: dtype of the inference weights.
            in_place: later builds write into the weights of the first build, unless these are packed or quantised.
            quantization: quantization of the products of layers; none: they keep the dtype.

        Raises:
            NotDescribed: when the decoder does not use one of the model's weights.
            UserError: when heads cannot be split over the ranks, or products cannot be quantised.
        """
        self.architecture = model.architecture
        self._world = world
        self._dtype = dtype
        self.split = Split.of(model.architecture, world.rank, world.size)
        self._names = model.names
        self._parameters = frozenset(model.parameters)
        self._packs = choice.can_pack(world.device, dtype)
        self._float32_logits = model.float32_logits
        self._product = product_maker(quantization, model.architecture, world.device, dtype)
        self._own_products = self._packs or quantization is not None
        self.in_place = in_place and not self._own_products
        """True if later builds write into the weights of the first build."""
        self._decoder: Decoder | None = None
        self._assembled: dict[str, Sequence[Tensor]] = {}
        self._four_bit: dict[str, FourBitLinear] = {}
        """Products that later builds update."""
        self._parts: dict[str, list[Tensor | FourBitPart | None]] = {}
        self.targets: dict[str, list[tuple[str, int, Pick]]] = {name: [] for name in model.unread}
        """For each training weight: inference weights that it goes to, as (name, part index, pick)."""
        self._plan()
        if unknown := sorted(self._parameters - set(self.targets)):
            raise NotDescribed(f"the decoder has no use for the weight {unknown[0]}")

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._world.device

    def build(self, weights: Iterable[tuple[str, Tensor | FourBitWeight, bool]]) -> Decoder:
        """Build or update the decoder.

        Args:
            weights: yields name without the prefixes of adapters, full tensor or weight in 4 bits, and true if its
                memory stays valid and unchanged after this call, so that a view of it is enough. An update in place
                needs only the weights that have changed.
        """
        self._load_all(weights)
        if self._decoder is not None:
            self._decoder.refresh()
            return self._decoder
        decoder = Decoder(self.architecture, self.assemble(), self.split, self._world)
        if self.in_place:
            self._decoder = decoder
        return decoder

    def _load_all(self, weights: Iterable[tuple[str, Tensor | FourBitWeight, bool]]) -> None:
        """Load weights; keeps none of those that are not persistent, so their memory is free for the assembly."""
        for name, weight, persistent in weights:
            if isinstance(weight, FourBitWeight):
                self._load_four_bit(name, weight, persistent=persistent)
            else:
                self._load(name, weight.detach(), persistent=persistent)

    def _load(self, name: str, tensor: Tensor, *, persistent: bool) -> None:
        for key, index, pick in self.targets[name]:
            part = pick(tensor).to(device=self._world.device, dtype=self._dtype)
            if key in self._assembled:
                target = self._assembled[key][index]
                if target.data_ptr() != part.data_ptr():
                    target.copy_(part)
                continue
            self._parts[key][index] = part if persistent or not same_storage(part, tensor) else part.clone()

    def _load_four_bit(self, name: str, weight: FourBitWeight, *, persistent: bool) -> None:
        for key, index, pick in self.targets[name]:
            if key in self._four_bit:
                self._four_bit[key].follow(index, weight)
            elif key in self._assembled:
                self._assembled[key][index].copy_(pick(weight.merged()))
            else:
                self._parts[key][index] = FourBitPart(weight.copied(codes=not persistent), pick)

    def assemble(self) -> DecoderWeights:
        """Fuse and pack the loaded weights. The loader is empty afterwards and can be filled again."""
        if missing := sorted(key for key, parts in self._parts.items() if any(part is None for part in parts)):
            raise ValueError(f"inference weights need all weights of the model, {missing[0]} was not loaded: load it")
        embed = self._take("embed.weight")
        head = self._take("head.weight")
        assert embed is not None
        return DecoderWeights(
            embed=embed,
            positions=self._take("positions.weight"),
            embed_norm=self._norm("embed_norm"),
            embed_in=self._take("embed_in.weight"),
            embed_out=self._take("embed_out.weight"),
            layer_inputs=self._layer_inputs(),
            layers=[self._layer(layer) for layer in range(self.architecture.layers)],
            final_norm=self._norm("final_norm"),
            head=InferenceLinear(
                embed if head is None else head, self._take("head.bias"), pack=self._packs, wide=self._float32_logits
            ),
        )

    def _layer(self, layer: int) -> LayerWeights:
        a = self.architecture
        split = self.split
        parts: dict[str, Any] = {role: self._linear(f"{layer}.{role}") for role in LAYER_PRODUCTS}
        parts |= {name: self._norm(f"{layer}.{name}") for name in LAYER_NORMS}
        parts |= {name: self._take(f"{layer}.{name}.weight") for name in ("shared_router", "sinks")}
        parts["latent"] = None if a.latent is None else self._latent(layer, a.latent)
        parts["recurrent"] = parts["experts"] = None
        if a.recurrence is not None and layer in a.recurrent_layers:
            parts["recurrent"] = self._recurrent(layer, a.recurrence)
        if a.experts is not None and layer in a.expert_layers:
            parts["experts"] = self._experts(layer, a.experts)
        parts["q_norm"] = self._head_norm(f"{layer}.q_norm", a.heads, split.heads)
        parts["k_norm"] = self._head_norm(f"{layer}.k_norm", a.kv_heads, split.kv_heads)
        if (kind := a.layer_kinds[layer]) is not None and a.kinds[kind].unit_qk:
            parts["q_norm"] = parts["k_norm"] = self._plain_norm(a.head_dim)
        normed = a.normed_values and layer in a.cached_layers
        parts["v_norm"] = self._plain_norm(a.kv_size(a.attention_of(layer))[1]) if normed else None
        scale = a.layer_scales.get(layer)
        parts["scale"] = None if scale is None else scale.to(self._world.device, self._dtype)
        return LayerWeights(**parts)

    def _plain_norm(self, size: int) -> Norm:
        """Return a norm whose weight is 1."""
        weight = torch.ones(size, dtype=self._dtype, device=self._world.device)
        return Norm(weight - self.architecture.norm_offset, None, self.architecture)

    def _layer_inputs(self) -> LayerInputs | None:
        embed = self._take("inputs_embed.weight")
        project = self._take("inputs_project.weight")
        norm = self._norm("inputs_norm")
        if embed is None or project is None or norm is None:
            return None
        return LayerInputs(embed, InferenceLinear(project, None, pack=self._packs), norm)

    def _latent(self, layer: int, kind: Latent) -> LatentAttention:
        key = f"{layer}.latent"
        parts: dict[str, Any] = {name: self._linear(f"{key}.{name}") for name in ("down", "q")}
        parts |= {name: self._norm(f"{key}.{name}", eps=kind.norm_eps) for name in ("q_norm", "kv_norm")}
        parts["kv_up"] = self._take(f"{key}.kv_up.weight")
        return LatentAttention(kind, **parts)

    def _recurrent(self, layer: int, kind: Recurrence) -> Mixer[Any]:
        a = self.architecture
        products: dict[str, Any] = {
            name: self._linear(f"{layer}.recurrent_{part}") for name, part in (("project", "in"), ("out", "out"))
        }
        others = {}
        for role in kind.others(self.split.recurrent):
            for part, ending in (("weight", ""), ("bias", ".bias")):
                tensor = self._take(f"{layer}.{role}.{part}")
                if tensor is not None:
                    others[role.removeprefix("recurrent_") + ending] = tensor
        activation = a.recurrent_activation or a.activation
        return mixer(kind, MixerWeights(**products, others=others), activation, a.norm_eps)

    def _take(self, key: str) -> Tensor | None:
        """Return an inference weight with its parts fused, and release the parts; None if the model lacks it."""
        loaded = [part for part in self._parts.get(key, ()) if part is not None]
        if not loaded:
            return None
        parts = [part.dense() if isinstance(part, FourBitPart) else part for part in loaded]
        self._parts[key] = [None] * len(parts)
        whole = parts[0]
        if len(parts) > 1:
            view = adjacent_view(parts)
            whole = torch.cat(parts) if view is None else view
        if self.in_place:
            self._assembled[key] = whole.split([len(part) for part in parts])
        return whole

    def _linear(self, key: str) -> Linear | None:
        loaded = self._parts.get(f"{key}.weight", [])
        parts = [part for part in loaded if isinstance(part, FourBitPart)]
        if parts and len(parts) == len(loaded):
            self._parts[f"{key}.weight"] = [None] * len(parts)
            product = FourBitLinear(parts, self._take(f"{key}.bias"))
            if self.in_place:
                self._four_bit[f"{key}.weight"] = product
            return product
        weight = self._take(f"{key}.weight")
        return None if weight is None else self._product(weight, self._take(f"{key}.bias"))

    def _experts(self, layer: int, kind: Experts) -> RoutedExperts:
        weights: dict[str, Any] = {}
        for name, role in (("router", "router"), ("up", "experts_up"), ("down", "experts_down")):
            weights[name] = self._take(f"{layer}.{role}.weight")
            weights[f"{name}_bias"] = self._take(f"{layer}.{role}.bias")
        correction = self._take(f"{layer}.router_correction.weight")
        if correction is None and layer in self.architecture.router_corrections:
            correction = self.architecture.router_corrections[layer].to(self._world.device)
        return RoutedExperts(
            kind,
            **weights,
            mine=self.split.experts,
            correction=correction,
            product=self._product if self._own_products else None,
            scale=self._take(f"{layer}.experts_scale.weight"),
        )

    def _norm(self, key: str, *, eps: float | None = None) -> Norm | None:
        weight = self._take(f"{key}.weight")
        a = self.architecture
        a = a if eps is None else replace(a, norm_eps=eps)
        return None if weight is None else Norm(weight, self._take(f"{key}.bias"), a)

    def _head_norm(self, key: str, heads: int, mine: range) -> Norm | HeadNorm | SplitNorm | None:
        a = self.architecture
        if a.qk_norm == "shared":
            return self._norm(key)
        weight = self._take(f"{key}.weight")
        if weight is None:
            return None
        if a.qk_norm == "per_head":
            return HeadNorm(weight.view(heads, a.head_dim)[mine.start : mine.stop], a)
        return SplitNorm(weight, a, size=heads * a.head_dim, world=self._world)

    def _plan(self) -> None:
        for role in ("embed", "head", "inputs_embed"):
            self._place(role, role, rows_of(self.split.vocabulary))
        self._place("head", SCORE_HEAD, all_of)
        for role in ("positions", "embed_norm", "embed_in", "embed_out", "inputs_project", "inputs_norm", "final_norm"):
            self._place(role, role, all_of)
        for layer in range(self.architecture.layers):
            for role in (*LAYER_NORMS, "input_gate", "input_out"):
                self._place(f"{layer}.{role}", role, all_of, layer)
            self._plan_head_norm(layer, "q_norm", self.architecture.heads, self.split.heads)
            self._plan_head_norm(layer, "k_norm", self.architecture.kv_heads, self.split.kv_heads)
            if self.architecture.layer_kinds[layer] is not None:
                self._plan_attention(layer)
            if self.architecture.recurrence is not None and layer in self.architecture.recurrent_layers:
                self._plan_recurrent(layer, self.architecture.recurrence)
            self._plan_mlp(layer)

    def _plan_latent(self, layer: int, kind: Latent) -> None:
        """Plan latent attention: ranks have different heads, and each has all latents."""
        key = f"{layer}.latent"
        heads = self.split.heads

        def rows(per_head: int) -> range:
            return range(heads.start * per_head, heads.stop * per_head)

        query = kind.plain_dims + kind.rotated_dims
        up = kind.plain_dims + kind.value_dims
        width = kind.size + kind.rotated_dims
        interleaved = self.architecture.interleaved_rotary
        for part, role in (("q_norm", "q_down_norm"), ("kv_norm", "kv_down_norm")):
            self._place(f"{key}.{part}", role, all_of, layer)
        pick = rows_of(rows(query))
        self._place(f"{key}.q", "latent_q", self._halves(pick, query, kind.plain_dims) if interleaved else pick, layer)
        pick = self._halves(all_of, width, kind.size) if interleaved else all_of
        parts = 2 if f"{key}.q_norm.weight" in self._parts else 1  # 1: queries come from the hidden states
        self._place(f"{key}.down", "q_down", all_of, layer, part=0, parts=parts)
        self._place(f"{key}.down", "kv_down", pick, layer, part=parts - 1, parts=parts)
        self._place(f"{key}.kv_up", "kv_up", rows_of(rows(up)), layer)
        self._place_row_parallel(f"{layer}.o", "o", rows(kind.value_dims), layer)

    def _plan_attention(self, layer: int) -> None:
        if self.architecture.latent is not None:
            return self._plan_latent(layer, self.architecture.latent)
        a = self.architecture
        split = self.split
        kind = self.architecture.attention_of(layer)
        d = a.kv_size(kind)[1]
        q = range(split.heads.start * d, split.heads.stop * d)
        kv = torch.cat([torch.arange(head * d, (head + 1) * d) for head in split.kv_heads_of[kind]])
        if layer in a.kv_sources:
            self._place(f"{layer}.qkv", "q", rows_of(q), layer)
        elif "qkv" in self._names:
            self._place(f"{layer}.qkv", "qkv", fused_qkv(a, split, whole=self._world.size == 1), layer)
        else:
            gated = a.gated_attention
            parts = 4 if a.gated_attention else 3
            if gated:
                self._place(f"{layer}.qkv", "q", halves_of(split.heads, d, 1), layer, part=3, parts=parts)
            query = halves_of(split.heads, d, 0) if gated else rows_of(q)
            for index, (role, pick) in enumerate((("q", query), ("k", listed(kv)), ("v", listed(kv)))):
                if role != "v" and a.interleaved_rotary:
                    pick = self._halves(pick, d, 0)
                self._place(f"{layer}.qkv", role, pick, layer, part=index, parts=parts)
        self._place_row_parallel(f"{layer}.o", "o", q, layer)
        self._place_one(f"{layer}.sinks.weight", "sinks", "weight", rows_of(split.heads), layer)

    def _plan_recurrent(self, layer: int, kind: Recurrence) -> None:
        """Plan a recurrent layer: ranks have different units."""
        mine = self.split.recurrent
        inputs = kind.inputs(mine)
        for part, (role, rows) in enumerate(inputs.items()):
            self._place(f"{layer}.recurrent_in", role, listed(rows), layer, part=part, parts=len(inputs))
        for role, rows in kind.others(mine).items():
            self._place(f"{layer}.{role}", role, listed(rows), layer)
        self._place_row_parallel(f"{layer}.recurrent_out", "recurrent_out", kind.columns(mine), layer)

    def _plan_head_norm(self, layer: int, role: str, heads: int, mine: range) -> None:
        """Plan the norm of queries or keys: all its weights, or this rank's heads if it is over all heads."""
        a, d = self.architecture, self.architecture.head_dim
        pick: Pick = torch.flatten
        if a.qk_norm == "over_heads":
            pick = rows_of(range(mine.start * d, mine.stop * d))
        elif a.interleaved_rotary:
            pick = self._halves(pick, d, 0)
        parts = heads if "{head}" in self._names.get(role, "") else 1
        for head in range(parts):
            self._place(f"{layer}.{role}", role, pick, layer, part=head, parts=parts)

    def _halves(self, pick: Pick, size: int, start: int) -> Pick:
        """Reorder rows of Q or K so that rotation of neighbours becomes rotation of halves; scores do not change.

        Of each head of `size` dimensions, only the rotated dimensions from `start` on are reordered.
        """
        rotary = next(kind.rotary for kind in self.architecture.kinds if kind.rotary is not None)
        end = start + 2 * len(rotary.inv_freq)
        parts = (torch.arange(start), torch.arange(start, end, 2), torch.arange(start + 1, end, 2))
        return reordered(pick, torch.cat([*parts, torch.arange(end, size)]))

    def _plan_mlp(self, layer: int) -> None:
        kind = self.architecture.experts if layer in self.architecture.expert_layers else None
        if kind is None or kind.beside_mlp:
            size = self.architecture.mlp_sizes.get(layer, self.architecture.mlp_size)
            self._plan_dense(layer, "", share(size, self._world.rank, self._world.size), size)
        if kind is not None:
            self._plan_experts(layer, kind)

    def _plan_experts(self, layer: int, kind: Experts) -> None:
        for role in ("router", "router_correction", "experts_scale"):
            self._place(f"{layer}.{role}", role, all_of, layer)
        for role, alternating in (("experts_up", kind.alternating), ("experts_down", False)):
            for part, transposed in (("weight", kind.transposed), ("bias", False)):
                pick = experts_of(self.split.experts, transposed=transposed, alternating=alternating)
                self._place_one(f"{layer}.{role}.{part}", role, part, pick, layer)
        if kind.shared_size:
            self._plan_dense(layer, "shared_", self.split.shared_mlp, kind.shared_size)
            self._place(f"{layer}.shared_router", "shared_router", all_of, layer)

    def _plan_dense(self, layer: int, prefix: str, mine: range, size: int) -> None:
        """Plan an MLP of `size` intermediate units; the names of its roles begin with `prefix`."""
        key = f"{layer}.up"
        gate = f"{prefix}gate"
        up = f"{prefix}up"
        fused = f"{prefix}gate_up"
        if fused in self._names:
            second = range(size + mine.start, size + mine.stop)
            halves: Pick = lambda t: torch.cat([rows_of(mine)(t), rows_of(second)(t)])  # noqa: E731
            self._place(key, fused, all_of if len(mine) == size else halves, layer)
        elif gate in self._names:
            self._place(key, gate, rows_of(mine), layer, part=0, parts=2)
            self._place(key, up, rows_of(mine), layer, part=1, parts=2)
        else:
            self._place(key, up, rows_of(mine), layer)
        self._place_row_parallel(f"{layer}.down", f"{prefix}down", mine, layer)

    def _place_row_parallel(self, key: str, role: str, columns: range, layer: int) -> None:
        """Plan a product that is split by columns. Only the first rank adds the bias."""
        self._place_one(f"{key}.weight", role, "weight", columns_of(columns), layer)
        bias = all_of if self._world.rank == 0 else torch.zeros_like
        self._place_one(f"{key}.bias", role, "bias", bias, layer)

    def _place(self, key: str, role: str, pick: Pick, layer: int = 0, *, part: int = 0, parts: int = 1) -> None:
        for kind in ("weight", "bias"):
            self._place_one(f"{key}.{kind}", role, kind, pick, layer, part, parts)

    def _place_one(self, key: str, role: str, kind: str, pick: Pick, layer: int, part: int = 0, parts: int = 1) -> None:
        for module in self._names.get(role, "").split("|"):
            path = module.format(layer, head=part)
            name = f"{path}.{kind}"
            if path in self._parameters:  # experts are parameters, not modules
                name = path if kind == "weight" else f"{path}_{kind}"
            if name in self._parameters:
                if self.architecture.transposed and role in PRODUCTS and kind == "weight":
                    pick = after_transpose(pick)
                if role in self.architecture.weight_scales:
                    pick = Scaled(pick, self.architecture.weight_scales[role])
                self._parts.setdefault(key, [None] * parts)
                self.targets.setdefault(name, []).append((key, part, pick))
                return


def architecture_of(lm: PreTrainedModel) -> ModelDescription | None:
    """Return the description of a model; None if it cannot have inference weights."""
    try:
        return describe(lm)[0]
    except NotDescribed:
        return None


def plan_inference_weights(
    lm: PreTrainedModel,
    names: Iterable[str],
    *,
    world: World,
    dtype: torch.dtype,
    in_place: bool = False,
    quantization: Quantization | None = None,
) -> InferenceWeights | None:
    """Plan inference weights, as InferenceWeights; None, with a log line, if the family table does not cover the model.

    Raises:
        UserError: for such a model with tensor parallelism or quantization, which its Hugging Face module does not
            support.
    """
    try:
        model = DescribedModel.of(lm, names)
        return InferenceWeights(model, world=world, dtype=dtype, in_place=in_place, quantization=quantization)
    except NotDescribed as error:
        if quantization is not None:
            raise UserError(
                f"rollout.quantization {quantization} needs inference weights, {type(lm).__name__} has none ({error}): "
                "leave it out"
            ) from error
        if world.size > 1:
            raise UserError(
                f"tensor parallelism needs inference weights, {type(lm).__name__} has none ({error}): "
                "set tensor_parallel to 1"
            ) from error
        if world.is_main:
            logger.info("generation of %s runs through its Hugging Face module: %s", type(lm).__name__, error)
        return None


class SharedWeights:
    """Inference weights that share memory with a model where possible, and follow its training."""

    def __init__(self, lm: PreTrainedModel, weights: InferenceWeights, adapters: Mapping[str, NumberedAdapter]) -> None:
        """Args: the model, which is weakly referenced, the plan of its inference weights, and adapters by name."""
        self._lm = weakref.ref(lm)
        self._weights = weights
        self.adapters = adapters
        """Adapters by name."""
        self._version: list[tuple[int, int]] = []

    @classmethod
    def of(
        cls,
        lm: PreTrainedModel,
        *,
        world: World,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
        adapters: Mapping[str, NumberedAdapter] | None = None,
    ) -> SharedWeights | None:
        """Plan the inference weights of a model; None as in `plan_inference_weights`.

        Args:
            lm: model with its full weights.
            world: the tensor-parallel ranks.
            dtype: dtype of the inference weights.
            quantization: quantization of the products of layers; none: they keep the dtype.
            adapters: adapters by name; on a single rank only.

        Raises:
            UserError: as in `plan_inference_weights`; with adapters, also when the model has no inference weights.
        """
        names = [name for name, _ in lm.named_parameters()]
        # in place: after training, copies are rewritten at the addresses that CUDA graphs contain
        weights = plan_inference_weights(lm, names, world=world, dtype=dtype, in_place=True, quantization=quantization)
        if weights is None and adapters:
            raise UserError(f"adapters need inference weights, {type(lm).__name__} has none: serve merged models")
        return None if weights is None else cls(lm, weights, adapters or {})

    def newer(self) -> Decoder | None:
        """Return the decoder of the current weights; None if they have not changed since the last call.

        Weights have changed if the version or address of a parameter is new, as after an optimizer step or
        `load_state_dict`. In-place changes of `parameter.data` are not detected.

        Raises:
            UserError: when a product does not support its adapters.
        """
        lm = self._lm()
        parameters = {} if lm is None else dict(lm.named_parameters())
        version = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters.values()]
        if not version or version == self._version:
            return None
        self._version = version
        decoder = self._weights.build((name, tensor, True) for name, tensor in parameters.items())
        if self.adapters and not decoder.has_adapters:
            decoder.set_adapters(self.replace_adapters(self.adapters))
        return decoder

    def replaced(self, lm: PreTrainedModel) -> Decoder:
        """Return the decoder of the weights of another model of the same architecture, whose memory it does not keep.
        On a GPU, these are written in place. There must be no adapters."""
        return self._weights.build((name, tensor, False) for name, tensor in lm.named_parameters())

    def replace_adapters(
        self, adapters: Mapping[str, NumberedAdapter], like: PreTrainedModel | None = None
    ) -> dict[Place, list[LowRankChange]]:
        """Take other adapters, and return their changes of products, on the device of the decoder.

        Args:
            adapters: by name.
            like: a model with the shapes of the weights; none: the model of these weights, which still exists.

        Raises:
            UserError: when a product does not support its adapter.
        """
        lm = self._lm() if like is None else like
        assert lm is not None, "a model outlives its inference weights"
        parameters = dict(lm.named_parameters())
        changes = adapter_changes(adapters, parameters, self._weights.targets, device=self._weights.device)
        self.adapters = adapters
        return changes


def decoder_of(
    lm: PreTrainedModel, *, world: World, dtype: torch.dtype, quantization: Quantization | None = None
) -> Decoder | None:
    """Build the decoder of a model with full weights; None if it has no inference weights. See `SharedWeights.of`."""
    shared = SharedWeights.of(lm, world=world, dtype=dtype, quantization=quantization)
    return None if shared is None else shared.newer()
