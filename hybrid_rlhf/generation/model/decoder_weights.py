"""The tensors of a decoder on one rank, filled by `InferenceWeights` (weights/).

Shapes: A heads of this rank, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybrid_rlhf.generation.model.experts import RoutedExperts
from hybrid_rlhf.generation.model.latent import LatentAttention
from hybrid_rlhf.generation.model.layers import HeadNorm, InferenceLinear, Linear, Norm, SplitNorm, weight_bytes
from hybrid_rlhf.generation.model.recurrent.mixers import Mixer

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
    """Every tensor of a rank's decoder."""

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

    @property
    def product_bytes(self) -> int:
        """Bytes of the matrices that a decoding step reads. All experts count, as in a step with many tokens."""
        products = [product for layer in self.layers for product in layer.products.values()]
        products += [self.head, *([] if self.layer_inputs is None else [self.layer_inputs.project])]
        latents = sum(layer.latent.kv_up.nbytes for layer in self.layers if layer.latent is not None)
        experts = sum(layer.experts.weight_bytes for layer in self.layers if layer.experts is not None)
        # without the padding of packed weights
        return experts + latents + sum(map(weight_bytes, products))

    def refresh(self) -> None:
        """Recompute tensors derived from weights, after the weights were updated in place."""
        norms = [self.embed_norm, self.final_norm, None if self.layer_inputs is None else self.layer_inputs.norm]
        norms += [getattr(layer, name) for layer in self.layers for name in (*LAYER_NORMS, *HEAD_NORMS)]
        for part in (*norms, *(layer.latent for layer in self.layers)):
            if isinstance(part, Norm | LatentAttention):
                part.refresh()
