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

LAYER_NORMS = (
    *("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm", "input_out_norm"),
    *("dense_out_norm", "experts_norm", "experts_out_norm", "router_norm"),
)
HEAD_NORMS = ("q_norm", "k_norm")


@dataclass
class LayerWeights:
    """One block. Norms that the family lacks are None."""

    attention_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    dense_out_norm: Norm | None
    experts_norm: Norm | None
    experts_out_norm: Norm | None
    router_norm: Norm | None
    """What the MLP gives, what experts beside it read and give, and what their router reads (Experts.beside_mlp)."""
    q_norm: Norm | HeadNorm | SplitNorm | None
    k_norm: Norm | HeadNorm | SplitNorm | None
    v_norm: Norm | None
    """Without a weight that is trained."""
    qkv: Linear | None
    """Queries alone in a layer that attends to the keys of another one."""
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
    input_gate: Linear | None
    input_out: Linear | None
    input_out_norm: Norm | None
    """What the layer adds of its inputs (LayerInputs)."""
    scale: Tensor | None
    """[1], which the residual stream is multiplied by."""

    @property
    def products(self) -> dict[str, Linear]:
        """Its products with packed or quantised weights, without those of experts."""
        each = {name: getattr(self, name) for name in ("qkv", "o", "up", "down", "input_gate", "input_out")}
        each |= {} if self.latent is None else self.latent.products
        mixer = None if self.recurrent is None else self.recurrent.weights
        each |= {} if mixer is None else {"in": mixer.project, "out": mixer.out}
        return {name: product for name, product in each.items() if product is not None}


@dataclass
class LayerInputs:
    """What gives each layer an input of its own: a second embedding, and a product of the first (Gemma 4)."""

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
        """Bytes of the matrices that a decoding step reads: all experts, as a step of many tokens does."""
        products = [product for layer in self.layers for product in layer.products.values()]
        products += [self.head, *([] if self.layer_inputs is None else [self.layer_inputs.project])]
        latents = sum(layer.latent.kv_up.nbytes for layer in self.layers if layer.latent is not None)
        experts = sum(layer.experts.weight_bytes for layer in self.layers if layer.experts is not None)
        # without what packing fills up
        return experts + latents + sum(p.outputs * p.inputs * p.weight.element_size() for p in products)

    def refresh(self) -> None:
        """Recompute what is derived from weights, after these were updated in place."""
        norms = [self.embed_norm, self.final_norm, None if self.layer_inputs is None else self.layer_inputs.norm]
        norms += [getattr(layer, name) for layer in self.layers for name in (*LAYER_NORMS, *HEAD_NORMS)]
        for part in (*norms, *(layer.latent for layer in self.layers)):
            if part is not None:
                part.refresh()
