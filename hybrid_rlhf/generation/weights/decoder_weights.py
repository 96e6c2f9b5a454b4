"""The tensors of a decoder on one rank, as the loader (loader.py) fills them.

Shapes: A heads of this rank, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybrid_rlhf.generation.model.experts import RoutedExperts
from hybrid_rlhf.generation.model.latent import LatentAttention
from hybrid_rlhf.generation.model.layers import HeadNorm, InferenceLinear, Norm, SplitNorm
from hybrid_rlhf.generation.model.quantised import Linear
from hybrid_rlhf.generation.model.recurrent.mixers import Mixer

LAYER_NORMS = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
HEAD_NORMS = ("q_norm", "k_norm")


@dataclass
class LayerWeights:
    """One block. Norms that the family lacks are None."""

    attention_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    q_norm: Norm | HeadNorm | SplitNorm | None
    k_norm: Norm | HeadNorm | SplitNorm | None
    qkv: Linear | None
    latent: LatentAttention | None
    """In place of `qkv`."""
    o: Linear | None
    recurrent: Mixer | None
    """In place of attention or beside it."""
    up: Linear | None
    down: Linear | None
    """The MLP, or the shared experts of a layer with a mixture; `up` holds gate and up fused where it is gated."""
    experts: RoutedExperts | None
    sinks: Tensor | None
    """[A], see AttentionFunction."""
    shared_router: Tensor | None
    """[1, H], whose sigmoid weighs the shared experts (Qwen2-MoE)."""

    @property
    def products(self) -> dict[str, Linear]:
        """Its products with packed or quantised weights, without those of experts."""
        each = {"qkv": self.qkv, "o": self.o, "up": self.up, "down": self.down}
        each |= {} if self.latent is None else self.latent.products
        mixer = None if self.recurrent is None else self.recurrent.weights
        each |= {} if mixer is None else {"in": mixer.project, "out": mixer.out}
        return {name: product for name, product in each.items() if product is not None}


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
        weights = [product.weight for layer in self.layers for product in layer.products.values()]
        weights += [layer.latent.kv_up for layer in self.layers if layer.latent is not None]
        experts = sum(layer.experts.weight_bytes for layer in self.layers if layer.experts is not None)
        return experts + sum(weight.numel() * weight.element_size() for weight in (*weights, self.head.weight))

    def refresh(self) -> None:
        """Recompute what is derived from weights, after these were updated in place."""
        norms = [self.embed_norm, self.final_norm]
        norms += [getattr(layer, name) for layer in self.layers for name in (*LAYER_NORMS, *HEAD_NORMS)]
        for part in (*norms, *(layer.latent for layer in self.layers)):
            if part is not None:
                part.refresh()
