"""Rows of the family table for models whose layers differ in size, share keys and values, or have per-layer inputs.

Source: Gemma 4 (google/gemma-4-E2B-it and larger), as in transformers' gemma4: heads of full and sliding attention
differ in size, the last layers attend to the keys and values of the last layer of their type that computes them, and
each layer may take an embedding of the token besides the residual stream, and have a mixture of experts and an MLP.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

from hybrid_rlhf.models.families.experts import gemma4_experts
from hybrid_rlhf.models.families.family import Family
from hybrid_rlhf.models.families.table import FAMILIES as ATTENTION_FAMILIES

_LAYER = "model.layers.{}."
_GEMMA4 = {
    **ATTENTION_FAMILIES["gemma3_text"].names,
    # full attention may use its keys as values
    "v": f"{_LAYER}self_attn.v_proj|{_LAYER}self_attn.k_proj",
    "inputs_embed": "model.embed_tokens_per_layer",
    "inputs_project": "model.per_layer_model_projection",
    "inputs_norm": "model.per_layer_projection_norm",
    "input_gate": f"{_LAYER}per_layer_input_gate",
    "input_out": f"{_LAYER}per_layer_projection",
    "input_out_norm": f"{_LAYER}post_per_layer_input_norm",
    "layer_scale": f"{_LAYER}layer_scalar",
    "router": f"{_LAYER}router.proj",
    "router_norm": f"{_LAYER}router.scale",
    "experts_up": f"{_LAYER}experts.gate_up_proj",
    "experts_down": f"{_LAYER}experts.down_proj",
    "experts_scale": f"{_LAYER}router.per_expert_scale",
    "dense_out_norm": f"{_LAYER}post_feedforward_layernorm_1",
    "experts_norm": f"{_LAYER}pre_feedforward_layernorm_2",
    "experts_out_norm": f"{_LAYER}post_feedforward_layernorm_2",
}


def _kv_sizes(config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Number and dimension of the KV heads, by layer type."""
    layers = {name: config.per_layer_config[layer] for layer, name in enumerate(config.layer_types)}
    return {name: (layer.num_key_value_heads, layer.head_dim) for name, layer in layers.items()}


def _gemma4(config: PreTrainedConfig) -> dict[str, Any]:
    types = config.layer_types
    sizes = _kv_sizes(config)
    kv_heads, head_dim = max(sizes.values(), key=math.prod)
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    last = {name: layer for layer, name in enumerate(types[:first_shared])}
    shared = range(first_shared, config.num_hidden_layers)
    return {
        "scale": 1.0,
        "norm_in_float32": True,
        "embed_scale": config.hidden_size**0.5,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "kv_sizes": sizes,
        "kv_sources": {layer: last[types[layer]] for layer in shared},
        "normed_values": True,
        "mlp_sizes": dict.fromkeys(shared, 2 * config.intermediate_size) if config.use_double_wide_mlp else {},
        "layer_input_size": getattr(config, "hidden_size_per_layer_input", 0) or 0,
        "weight_scales": {"router": config.hidden_size**-0.5},
    }


_GEMMA4_FAMILY = Family(
    _GEMMA4,
    _gemma4,
    {
        "attention in both directions": lambda c: c.use_bidirectional_attention == "all",
        "tokens without inputs of layers": lambda c: (
            getattr(c, "vocab_size_per_layer_input", c.vocab_size) < c.vocab_size
        ),
    },
    experts=gemma4_experts,
)
LAYERED_FAMILIES: dict[str, Family] = {"gemma4_text": _GEMMA4_FAMILY, "gemma4_unified_text": _GEMMA4_FAMILY}
