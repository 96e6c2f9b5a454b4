"""The family table: maps a Hugging Face model to a ModelDescription, and its parameter names to the decoder's.

A row lists module names and the few settings that a config does not state under the common names. A new family is one
row here and one line in the tests. Models without a row generate through their Hugging Face module; `describe` gives
the reason.

In names, {} is the layer, and | separates alternatives. A name is that of a module and stands for its weight and, if
there is one, its bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.generation.weights.description import Activation, AttentionKind, ModelDescription, Rotary
from hybrid_rlhf.models.families import head_convention


class NotDescribed(Exception):
    """A model that the decoder cannot compute; the message gives the reason."""


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    names: Mapping[str, str]
    """The decoder's names to the model's modules."""
    settings: Callable[[PreTrainedConfig], dict[str, Any]] = field(default=lambda config: {})
    """Fields of ModelDescription that this family derives in its own way."""
    unsupported: Mapping[str, Callable[[PreTrainedConfig], bool]] = field(default_factory=dict)
    """Variants of the family that the decoder does not support, by reason."""


def describe(lm: PreTrainedModel) -> tuple[ModelDescription, Mapping[str, str]]:
    """The architecture of a causal LM, and the names of its modules.

    Raises:
        NotDescribed: when no row of the table covers it.
    """
    config = lm.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise NotDescribed(f"no row for model type {config.model_type}")
    for reason, holds in family.unsupported.items():
        if holds(config):
            raise NotDescribed(reason)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    head = head_convention(config)
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "mlp_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "norm": "rms" if hasattr(config, "rms_norm_eps") else "layer",
        "norm_eps": _first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-5),
        "activation": _activation(_first(config, "hidden_act", "hidden_activation", "activation_function")),
        "final_softcap": head.softcap,
        "logit_scale": head.scale,
    }
    settings = family.settings(config)
    scale = settings.pop("scale", head_dim**-0.5)
    kinds, layer_kinds = _kinds(lm, scale, rotary=settings.get("alibi") is None)
    return ModelDescription(**{**common, "kinds": kinds, "layer_kinds": layer_kinds, **settings}), family.names


def _first(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _activation(name: str | None) -> Activation:
    if name is not None and name not in _ACTIVATIONS:
        raise NotDescribed(f"no activation {name}")
    return _ACTIVATIONS[name or "gelu"]


def _kinds(
    lm: PreTrainedModel, scale: float | list[float], *, rotary: bool
) -> tuple[tuple[AttentionKind, ...], tuple[int, ...]]:
    """The kinds of attention in a model, which differ in window and rotary table or in scale; and each layer's kind."""
    config, layers = lm.config, lm.config.num_hidden_layers
    if isinstance(scale, list):
        return tuple(AttentionKind(one) for one in scale), tuple(range(layers))
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise NotDescribed(f"no layer type {min(unknown)}")
    order = sorted(set(types))
    kinds = tuple(
        AttentionKind(scale, window if name == "sliding_attention" else None, _rotary(lm, name) if rotary else None)
        for name in order
    )
    return kinds, tuple(order.index(name) for name in types)


_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def _rotary(lm: PreTrainedModel, layer_type: str) -> Rotary | None:
    """The table that the model itself computed; tables that change with the sequence length are not supported."""
    module: Any = getattr(lm.base_model, "rotary_emb", None)
    if module is None:
        return None
    kind, prefix = module.rope_type, ""
    if isinstance(kind, dict):  # a table for each layer type
        kind, prefix = kind[layer_type], f"{layer_type}_"
    if kind not in _STATIC_ROPE:
        raise NotDescribed(f"rotary positions of type {kind} change with the length")
    inv_freq = getattr(module, f"{prefix}inv_freq").detach().float().cpu()
    return Rotary(inv_freq, float(getattr(module, f"{prefix}attention_scaling")))


def _slopes(heads: int) -> torch.Tensor:
    """ALiBi's slopes [heads]: a geometric sequence, completed from every other term of the next (its section 3)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes)


def _llama_like(**other: str) -> dict[str, str]:
    layer = "model.layers.{}."
    names = {
        "embed": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "attention_norm": f"{layer}input_layernorm",
        "mlp_norm": f"{layer}post_attention_layernorm",
        "q": f"{layer}self_attn.q_proj",
        "k": f"{layer}self_attn.k_proj",
        "v": f"{layer}self_attn.v_proj",
        "q_norm": f"{layer}self_attn.q_norm",
        "k_norm": f"{layer}self_attn.k_norm",
        "o": f"{layer}self_attn.o_proj",
        "gate": f"{layer}mlp.gate_proj",
        "up": f"{layer}mlp.up_proj",
        "down": f"{layer}mlp.down_proj",
    }
    return {**names, **{name: layer + module for name, module in other.items()}}


_PHI3 = _llama_like(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
for _separate in ("q", "k", "v", "gate", "up"):
    del _PHI3[_separate]
_GEMMA = _llama_like(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_OPT = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "head": "lm_head",
    "embed_in": "model.decoder.project_in",
    "embed_out": "model.decoder.project_out",
    "final_norm": "model.decoder.final_layer_norm",
    "attention_norm": "model.decoder.layers.{}.self_attn_layer_norm",
    "mlp_norm": "model.decoder.layers.{}.final_layer_norm",
    "q": "model.decoder.layers.{}.self_attn.q_proj",
    "k": "model.decoder.layers.{}.self_attn.k_proj",
    "v": "model.decoder.layers.{}.self_attn.v_proj",
    "o": "model.decoder.layers.{}.self_attn.out_proj",
    "up": "model.decoder.layers.{}.fc1",
    "down": "model.decoder.layers.{}.fc2",
}
_GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "transformer.h.{}.ln_1",
    "mlp_norm": "transformer.h.{}.ln_2",
    "qkv": "transformer.h.{}.attn.c_attn",
    "o": "transformer.h.{}.attn.c_proj",
    "up": "transformer.h.{}.mlp.c_fc",
    "down": "transformer.h.{}.mlp.c_proj",
}
_NEOX = {
    "embed": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "lm_head|embed_out",
    "attention_norm": "gpt_neox.layers.{}.input_layernorm",
    "mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "qkv": "gpt_neox.layers.{}.attention.query_key_value",
    "o": "gpt_neox.layers.{}.attention.dense",
    "up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
}
_BLOOM = {
    "embed": "transformer.word_embeddings",
    "embed_norm": "transformer.word_embeddings_layernorm",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "transformer.h.{}.input_layernorm",
    "mlp_norm": "transformer.h.{}.post_attention_layernorm",
    "qkv": "transformer.h.{}.self_attention.query_key_value",
    "o": "transformer.h.{}.self_attention.dense",
    "up": "transformer.h.{}.mlp.dense_h_to_4h",
    "down": "transformer.h.{}.mlp.dense_4h_to_h",
}
_FALCON = {
    **{role: name for role, name in _BLOOM.items() if role != "embed_norm"},
    "attention_norm": "transformer.h.{}.input_layernorm|transformer.h.{}.ln_attn",
    "mlp_norm": "transformer.h.{}.post_attention_layernorm|transformer.h.{}.ln_mlp",
}


def _falcon(config: PreTrainedConfig) -> dict[str, Any]:
    grouped, parallel = config.new_decoder_architecture, config.new_decoder_architecture or config.parallel_attn
    kv_heads = config.num_kv_heads if grouped or not config.multi_query else 1
    head_dim = config.hidden_size // config.num_attention_heads
    return {
        "kv_heads": kv_heads,
        "qkv_order": "stacked" if config.multi_query and not grouped else "grouped",
        "block": "parallel" if parallel else "sequential",
        "activation": _activation(config.activation),
        "mlp_size": config.ffn_hidden_size,
        "alibi": _slopes(config.num_attention_heads) if config.alibi else None,
        "alibi_scale": head_dim**-0.5,
        "alibi_bfloat16": True,
    }


def _gemma(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "scale": config.query_pre_attn_scalar**-0.5,
        "norm_offset": 1.0,
        "norm_in_float32": True,
        "embed_scale": config.hidden_size**0.5,
        "attention_softcap": config.attn_logit_softcapping,
    }


def _gpt2(config: PreTrainedConfig) -> dict[str, Any]:
    scale = (config.hidden_size // config.num_attention_heads) ** -0.5 if config.scale_attn_weights else 1.0
    by_layer = config.scale_attn_by_inverse_layer_idx
    return {
        "scale": [scale / (layer + 1) for layer in range(config.num_hidden_layers)] if by_layer else scale,
        "transposed": True,
        "max_positions": config.max_position_embeddings,
        "mlp_size": config.n_inner or 4 * config.hidden_size,
    }


def _opt(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "mlp_size": config.ffn_dim,
        "position_offset": 2,
        "max_positions": config.max_position_embeddings,
        "block": "sequential" if config.do_layer_norm_before else "post_norm",
        "norm_eps": 1e-5,
    }


def _neox(config: PreTrainedConfig) -> dict[str, Any]:
    return {"qkv_order": "grouped", "block": "parallel" if config.use_parallel_residual else "sequential"}


def _bloom(config: PreTrainedConfig) -> dict[str, Any]:
    return {"qkv_order": "grouped", "alibi": _slopes(config.num_attention_heads), "activation": "gelu_tanh"}


_LLAMA = Family(_llama_like())
_GEMMA_FAMILY = Family(
    _GEMMA,
    _gemma,
    {"attention in both directions": lambda c: bool(getattr(c, "use_bidirectional_attention", False))},
)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA_FAMILY,
    "gemma3_text": _GEMMA_FAMILY,
    "phi3": Family(_PHI3),
    "opt": Family(_OPT, _opt, {"norms without weights": lambda c: not c.layer_norm_elementwise_affine}),
    "gpt2": Family(_GPT2, _gpt2, {"cross attention": lambda c: c.add_cross_attention}),
    "gpt_neox": Family(_NEOX, _neox),
    "bloom": Family(_BLOOM, _bloom, {"residuals after the norm": lambda c: c.apply_residual_connection_post_layernorm}),
    "falcon": Family(_FALCON, _falcon),
}
