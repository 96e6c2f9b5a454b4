"""Inference weights on one tensor-parallel rank, filled from named training weights.

Full weights arrive one by one, in any order; `load(name, tensor)` keeps this rank's part. A model that is partitioned,
on disk or has adapters can therefore be streamed through in buckets. Columns of attention and MLP are split over heads
and intermediate units, rows of the vocabulary over tokens (Megatron-LM, arXiv 1909.08053). A weight that needs no
change stays a view of the tensor it came from. Q, K, V and gate, up are fused, without a copy where they are adjacent
in memory.

Shapes: N outputs, K inputs of a product; H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.generation.model.experts import RoutedExperts
from hybrid_rlhf.generation.model.layers import HeadNorm, InferenceLinear, Norm, SplitNorm, can_pack
from hybrid_rlhf.generation.model.quantised import Linear, Quantization, product_maker
from hybrid_rlhf.generation.weights.describe import NotDescribed
from hybrid_rlhf.generation.weights.description import ModelDescription
from hybrid_rlhf.generation.weights.split import Split
from hybrid_rlhf.runtime.world import World

LAYER_NORMS = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
HEAD_NORMS = ("q_norm", "k_norm")
PRODUCTS = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")
Pick = Callable[[Tensor], Tensor]
"""Selects this rank's part of a full weight or bias, as a view where possible."""


@dataclass
class LayerWeights:
    """One block. Norms that the family lacks are None."""

    attention_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    q_norm: Norm | HeadNorm | SplitNorm | None
    k_norm: Norm | HeadNorm | SplitNorm | None
    qkv: Linear
    o: Linear
    up: Linear | None
    down: Linear | None
    """The MLP, or the shared experts of a layer with a mixture; `up` holds gate and up fused where it is gated."""
    experts: RoutedExperts | None
    sinks: Tensor | None
    """[A], see AttentionFunction."""
    shared_router: Tensor | None
    """[1, H], whose sigmoid weighs the shared experts (Qwen2-MoE)."""


@dataclass
class DecoderWeights:
    """Every tensor of a rank's decoder."""

    embed: Tensor
    """[rows of the vocabulary on this rank, H]."""
    positions: Tensor | None
    embed_norm: Norm | None
    embed_in: Tensor | None
    embed_out: Tensor | None
    layers: list[LayerWeights]
    final_norm: Norm | None
    head: InferenceLinear

    @property
    def product_bytes(self) -> int:
        """Bytes of the matrices that a decoding step reads: all experts, as a step of many tokens does."""
        products = [part for layer in self.layers for part in (layer.qkv, layer.o, layer.up, layer.down) if part]
        experts = sum(layer.experts.weight_bytes for layer in self.layers if layer.experts is not None)
        return experts + sum(part.weight.numel() * part.weight.element_size() for part in (*products, self.head))

    def refresh(self) -> None:
        """Recompute what is derived from weights, after these were updated in place."""
        norms = [self.embed_norm, self.final_norm]
        norms += [getattr(layer, name) for layer in self.layers for name in (*LAYER_NORMS, *HEAD_NORMS)]
        for norm in norms:
            if norm is not None:
                norm.refresh()


def adjacent_view(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors that are adjacent in one storage as a single tensor, without a copy; none where they are not."""
    first = parts[0]
    expected = first.data_ptr()
    for part in parts:
        if not (_same_storage(part, first) and part.is_contiguous() and part.data_ptr() == expected):
            return None
        expected += part.nbytes
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _rows(part: range) -> Pick:
    return lambda tensor: tensor[part.start : part.stop]


def _columns(part: range) -> Pick:
    return lambda tensor: tensor[:, part.start : part.stop]


def _all(tensor: Tensor) -> Tensor:
    return tensor


def _of_experts(part: range, *, transposed: bool, alternating: bool) -> Pick:
    """Some experts of weights [E, N, K], or [E, K, N] if transposed, and of biases [E, N]. Rows that alternate between
    gate and up are sorted."""

    def pick(tensor: Tensor) -> Tensor:
        some = tensor[part.start : part.stop]
        some = some.transpose(1, 2) if transposed else some
        return some.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if alternating else some

    return pick


class WeightLoader:
    """Plans where each training weight goes, receives them one by one, and assembles the decoder's weights."""

    def __init__(
        self,
        architecture: ModelDescription,
        names: Mapping[str, str],
        parameters: Iterable[str],
        *,
        world: World,
        dtype: torch.dtype,
        in_place: bool = False,
        float32_logits: bool = True,
        quantization: Quantization | None = None,
    ) -> None:
        """Plan.

        Args:
            architecture: of the model.
            names: the family's names for its modules.
            parameters: names of the training weights, tied ones once.
            world: the tensor-parallel ranks, and the device of this one.
            dtype: of the inference weights.
            in_place: weights loaded after `assemble` are written into the assembled ones, unless packed or quantised.
            float32_logits: whether the head computes in float32, whatever the dtype.
            quantization: of the products of the layers; none: they keep the dtype.

        Raises:
            NotDescribed: when the model has a weight that the decoder does not use.
            UserError: when the device or dtype has no quantised products.
        """
        self.architecture, self._world, self._dtype = architecture, world, dtype
        self.split = Split.of(architecture, world.rank, world.size)
        self._names, self._parameters = names, frozenset(parameters)
        self._packs, self._float32_logits = can_pack(world.device, dtype), float32_logits
        self._product = product_maker(quantization, architecture, world.device, dtype)
        self._own_products = self._packs or quantization is not None
        self.in_place = in_place and not self._own_products
        self._assembled: dict[str, Sequence[Tensor]] = {}
        self._parts: dict[str, list[Tensor | None]] = {}
        self._targets: dict[str, list[tuple[str, int, Pick]]] = {}
        self._plan()
        if unknown := sorted(self._parameters - set(self._targets)):
            raise NotDescribed(f"the decoder has no use for the weight {unknown[0]}")

    def load(self, name: str, tensor: Tensor, *, persistent: bool) -> None:
        """Receive a training weight.

        Args:
            name: of the weight in the model, without the prefixes of adapters.
            tensor: its full value.
            persistent: whether its memory stays valid and unchanged while the inference weights are used, so that a
                view of it is enough.
        """
        tensor = tensor.detach()
        for key, index, pick in self._targets[name]:
            part = pick(tensor).to(device=self._world.device, dtype=self._dtype)
            if key in self._assembled:
                target = self._assembled[key][index]
                if target.data_ptr() != part.data_ptr():
                    target.copy_(part)
                continue
            self._parts[key][index] = part if persistent or not _same_storage(part, tensor) else part.clone()

    def assemble(self) -> DecoderWeights:
        """Fuse and pack what was loaded. The loader is empty afterwards and can be filled again."""
        if missing := sorted(key for key, parts in self._parts.items() if any(part is None for part in parts)):
            raise ValueError(f"inference weights need all weights of the model, {missing[0]} was not loaded: load it")
        embed = self._take("embed.weight")
        assert embed is not None
        head = self._take("head.weight")
        return DecoderWeights(
            embed=embed,
            positions=self._take("positions.weight"),
            embed_norm=self._norm("embed_norm"),
            embed_in=self._take("embed_in.weight"),
            embed_out=self._take("embed_out.weight"),
            layers=[self._layer(layer) for layer in range(self.architecture.layers)],
            final_norm=self._norm("final_norm"),
            head=InferenceLinear(
                embed if head is None else head, self._take("head.bias"), pack=self._packs, wide=self._float32_logits
            ),
        )

    def _layer(self, layer: int) -> LayerWeights:
        products: dict[str, Any] = {name: self._linear(f"{layer}.{name}") for name in ("qkv", "o", "up", "down")}
        products["experts"] = self._experts(layer) if layer in self.architecture.expert_layers else None
        products["shared_router"] = self._take(f"{layer}.shared_router.weight")
        products["sinks"] = self._take(f"{layer}.sinks.weight")
        norms: dict[str, Any] = {name: self._norm(f"{layer}.{name}") for name in LAYER_NORMS}
        a, split = self.architecture, self.split
        norms["q_norm"] = self._head_norm(f"{layer}.q_norm", a.heads, split.heads)
        norms["k_norm"] = self._head_norm(f"{layer}.k_norm", a.kv_heads, split.kv_heads)
        return LayerWeights(**norms, **products)

    def _take(self, key: str) -> Tensor | None:
        """One inference weight: its parts fused, and released."""
        parts = [part for part in self._parts.get(key, ()) if part is not None]
        if not parts:
            return None
        self._parts[key] = [None] * len(parts)
        whole = parts[0]
        if len(parts) > 1:
            view = adjacent_view(parts)
            whole = torch.cat(parts) if view is None else view
        if self.in_place:
            self._assembled[key] = whole.split([len(part) for part in parts])
        return whole

    def _linear(self, key: str) -> Linear | None:
        weight = self._take(f"{key}.weight")
        return None if weight is None else self._product(weight, self._take(f"{key}.bias"))

    def _experts(self, layer: int) -> RoutedExperts:
        kind, corrections = self.architecture.experts, self.architecture.router_corrections
        roles = ("router", "experts_up", "experts_down")
        router, up, down = (self._take(f"{layer}.{name}.weight") for name in roles)
        router_bias, up_bias, down_bias = (self._take(f"{layer}.{name}.bias") for name in roles)
        assert kind is not None and router is not None and up is not None and down is not None
        correction = corrections[layer].to(self._world.device) if layer in corrections else None
        return RoutedExperts(
            kind,
            router=router,
            up=up,
            down=down,
            mine=self.split.experts,
            correction=correction,
            product=self._product if self._own_products else None,
            router_bias=router_bias,
            up_bias=up_bias,
            down_bias=down_bias,
        )

    def _norm(self, key: str) -> Norm | None:
        weight = self._take(f"{key}.weight")
        return None if weight is None else Norm(weight, self._take(f"{key}.bias"), self.architecture)

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
        vocabulary = _rows(self.split.vocabulary)
        self._place("embed", "embed", vocabulary)
        self._place("head", "head", vocabulary)
        for role in ("positions", "embed_norm", "embed_in", "embed_out", "final_norm"):
            self._place(role, role, _all)
        for layer in range(self.architecture.layers):
            for role in LAYER_NORMS:
                self._place(f"{layer}.{role}", role, _all, layer)
            self._plan_head_norm(layer, "q_norm", self.architecture.heads, self.split.heads)
            self._plan_head_norm(layer, "k_norm", self.architecture.kv_heads, self.split.kv_heads)
            self._plan_attention(layer)
            self._plan_mlp(layer)

    def _plan_attention(self, layer: int) -> None:
        d, split = self.architecture.head_dim, self.split
        q, kv = (range(heads.start * d, heads.stop * d) for heads in (split.heads, split.kv_heads))
        if "qkv" in self._names:
            self._place(f"{layer}.qkv", "qkv", self._fused_qkv, layer)
        else:
            for index, (role, rows) in enumerate((("q", q), ("k", kv), ("v", kv))):
                pick = _rows(rows)
                if role != "v" and self.architecture.interleaved_rotary:
                    pick = self._halves(pick)
                self._place(f"{layer}.qkv", role, pick, layer, part=index, parts=3)
        self._place_row_parallel(f"{layer}.o", "o", q, layer)
        self._place_one(f"{layer}.sinks.weight", "sinks", "weight", _rows(split.heads), layer)

    def _plan_head_norm(self, layer: int, role: str, heads: int, mine: range) -> None:
        """A norm's weights: all, except where queries or keys are normed over all heads."""
        a, d = self.architecture, self.architecture.head_dim
        pick: Pick = torch.flatten
        if a.qk_norm == "over_heads":
            pick = _rows(range(mine.start * d, mine.stop * d))
        elif a.interleaved_rotary:
            pick = self._halves(pick)
        parts = heads if "{head}" in self._names.get(role, "") else 1
        for head in range(parts):
            self._place(f"{layer}.{role}", role, pick, layer, part=head, parts=parts)

    def _halves(self, pick: Pick) -> Pick:
        """Rows of Q or K in an order in which rotation of neighbours becomes rotation of halves; scores are the same.

        Only the rotated dimensions at the beginning of each head are reordered.
        """
        rotary = next(kind.rotary for kind in self.architecture.kinds if kind.rotary is not None)
        d, rotated = self.architecture.head_dim, 2 * len(rotary.inv_freq)
        order = torch.cat([torch.arange(0, rotated, 2), torch.arange(1, rotated, 2), torch.arange(rotated, d)])

        def reorder(tensor: Tensor) -> Tensor:
            rows = pick(tensor)
            return rows.unflatten(0, (-1, d))[:, order.to(rows.device)].flatten(0, 1)

        return reorder

    def _plan_mlp(self, layer: int) -> None:
        if layer not in self.architecture.expert_layers:
            return self._plan_dense(layer, "", self.split.mlp, self.architecture.mlp_size)
        self._place(f"{layer}.router", "router", _all, layer)
        kind = self.architecture.experts
        assert kind is not None
        for role, alternating in (("experts_up", kind.alternating), ("experts_down", False)):
            for part, transposed in (("weight", kind.transposed), ("bias", False)):
                pick = _of_experts(self.split.experts, transposed=transposed, alternating=alternating)
                self._place_one(f"{layer}.{role}.{part}", role, part, pick, layer)
        if kind.shared_size:
            self._plan_dense(layer, "shared_", self.split.shared_mlp, kind.shared_size)
            self._place(f"{layer}.shared_router", "shared_router", _all, layer)

    def _plan_dense(self, layer: int, prefix: str, mine: range, size: int) -> None:
        """An MLP, whose names begin with a prefix, of `size` inner units."""
        key, gate, up, fused = f"{layer}.up", f"{prefix}gate", f"{prefix}up", f"{prefix}gate_up"
        if fused in self._names:
            second = range(size + mine.start, size + mine.stop)
            whole = len(mine) == size
            self._place(key, fused, _all if whole else lambda t: torch.cat([_rows(mine)(t), _rows(second)(t)]), layer)
        elif gate in self._names:
            self._place(key, gate, _rows(mine), layer, part=0, parts=2)
            self._place(key, up, _rows(mine), layer, part=1, parts=2)
        else:
            self._place(key, up, _rows(mine), layer)
        self._place_row_parallel(f"{layer}.down", f"{prefix}down", mine, layer)

    def _place_row_parallel(self, key: str, role: str, columns: range, layer: int) -> None:
        """Each rank holds some columns; the first rank alone adds the bias."""
        self._place_one(f"{key}.weight", role, "weight", _columns(columns), layer)
        bias = _all if self._world.rank == 0 else torch.zeros_like
        self._place_one(f"{key}.bias", role, "bias", bias, layer)

    def _place(self, key: str, role: str, pick: Pick, layer: int = 0, *, part: int = 0, parts: int = 1) -> None:
        for kind in ("weight", "bias"):
            self._place_one(f"{key}.{kind}", role, kind, pick, layer, part, parts)

    def _place_one(self, key: str, role: str, kind: str, pick: Pick, layer: int, part: int = 0, parts: int = 1) -> None:
        for module in self._names.get(role, "").split("|"):
            own = module.format(layer, head=part)
            name = f"{own}.{kind}"
            if own in self._parameters:  # experts are parameters
                name = own if kind == "weight" else f"{own}_{kind}"
            if name in self._parameters:
                if self.architecture.transposed and role in PRODUCTS and kind == "weight":
                    pick = _after_transpose(pick)
                self._parts.setdefault(key, [None] * parts)
                self._targets.setdefault(name, []).append((key, part, pick))

    def _fused_qkv(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a fused weight or bias: its Q, then its K, then its V."""
        a, split = self.architecture, self.split
        if a.qkv_order == "stacked" and self._world.size == 1:
            return tensor
        d, rest = a.head_dim, tensor.shape[1:]
        if a.qkv_order == "stacked":
            q, k, v = tensor.reshape(-1, d, *rest).split([a.heads, a.kv_heads, a.kv_heads])
        else:
            groups = tensor.reshape(a.kv_heads, a.heads // a.kv_heads + 2, d, *rest)
            q, k, v = groups[:, :-2].reshape(a.heads, d, *rest), groups[:, -2], groups[:, -1]
        heads, kv = slice(split.heads.start, split.heads.stop), slice(split.kv_heads.start, split.kv_heads.stop)
        return torch.cat([q[heads], k[kv], v[kv]]).reshape(-1, *rest)


def _after_transpose(pick: Pick) -> Pick:
    return lambda tensor: pick(tensor.t())
