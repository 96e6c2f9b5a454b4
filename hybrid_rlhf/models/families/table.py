"""The family table: names of a model type's weights, and properties that its config does not state under common names.

Generation builds inference weights of the types in `FAMILIES` (generation/architecture/hugging_face.py). A new family
is one row here (family.py) and one variant in the tests. Types without a row generate through their Hugging Face
module.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedConfig

from hybrid_rlhf.models.families.experts import (
    deepseek_v2_experts,
    ernie_experts,
    glm4_experts,
    gpt_oss_experts,
    granite_experts,
    llama4_experts,
    mixtral_experts,
    phimoe_experts,
    qwen_experts,
)
from hybrid_rlhf.models.families.family import Family


def _slopes(heads: int) -> torch.Tensor:
    """ALiBi's slopes [heads]: a geometric sequence, completed from every other term of the next (its section 3)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes)


def _llama_like(**overrides: str) -> dict[str, str]:
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
    return {**names, **{name: layer + module for name, module in overrides.items()}}


def _without(names: dict[str, str], *roles: str) -> dict[str, str]:
    return {role: name for role, name in names.items() if role not in roles}


_PHI3 = _without(_llama_like(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"), "q", "k", "v", "gate", "up")
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
    **_without(_BLOOM, "embed_norm"),
    "attention_norm": "transformer.h.{}.input_layernorm|transformer.h.{}.ln_attn",
    "mlp_norm": "transformer.h.{}.post_attention_layernorm|transformer.h.{}.ln_mlp",
}


def _falcon(config: PreTrainedConfig) -> dict[str, Any]:
    grouped = config.new_decoder_architecture
    parallel = config.new_decoder_architecture or config.parallel_attn
    kv_heads = config.num_kv_heads if grouped or not config.multi_query else 1
    head_dim = config.hidden_size // config.num_attention_heads
    return {
        "kv_heads": kv_heads,
        "qkv_order": "stacked" if config.multi_query and not grouped else "grouped",
        "block": "parallel" if parallel else "sequential",
        "activation": config.activation,
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
    return {"qkv_order": "grouped", "alibi": _slopes(config.num_attention_heads), "activation": "gelu_pytorch_tanh"}


def _glm(config: PreTrainedConfig) -> dict[str, Any]:
    return {"interleaved_rotary": True}


def _olmo2(config: PreTrainedConfig) -> dict[str, Any]:
    return {"qk_norm": "over_heads", "norm_in_float32": True}


def _smollm3(config: PreTrainedConfig) -> dict[str, Any]:
    return {"layers_without_rotary": [layer for layer, uses in enumerate(config.no_rope_layers) if not uses]}


def _llama4(config: PreTrainedConfig) -> dict[str, Any]:
    temperature = config.attn_scale if config.attn_temperature_tuning else 0.0
    return {
        **_smollm3(config),
        "interleaved_rotary": True,
        "with_rotary": {"unit_qk": config.use_qk_norm},
        "without_rotary": {"temperature_scale": temperature, "temperature_tokens": config.floor_scale},
        "mlp_size": config.intermediate_size_mlp,
    }


def _granite(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "scale": config.attention_multiplier,
        "embed_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
    }


def _cohere(config: PreTrainedConfig) -> dict[str, Any]:
    full = [] if config.model_type == "cohere" else _full_layers(config)
    return {
        "block": "parallel",
        "interleaved_rotary": True,
        "norm_in_float32": True,
        "layers_without_rotary": full,
        "qk_norm": "per_head",
    }


def _exaone4(config: PreTrainedConfig) -> dict[str, Any]:
    return {"layers_without_rotary": _full_layers(config) if config.sliding_window is not None else []}


def _full_layers(config: PreTrainedConfig) -> list[int]:
    return [layer for layer, name in enumerate(config.layer_types) if name == "full_attention"]


_OUT_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
_POST_NORMS = _without(_llama_like(**_OUT_NORMS), "attention_norm", "mlp_norm")
_PLAIN_MLP = _without(_llama_like(), "gate")
_GLM = _without(_llama_like(gate_up="mlp.gate_up_proj"), "gate", "up")
_PHI = {
    **_without(_llama_like(o="self_attn.dense", up="mlp.fc1", down="mlp.fc2"), "gate"),
    "q_norm": "model.layers.{}.self_attn.q_layernorm",
    "k_norm": "model.layers.{}.self_attn.k_layernorm",
    "final_norm": "model.final_layernorm",
}
_STARCODER2 = {**_PLAIN_MLP, "up": "model.layers.{}.mlp.c_fc", "down": "model.layers.{}.mlp.c_proj"}


def _moe_like(block: str = "mlp", router: str = "gate", **overrides: str) -> dict[str, str]:
    """A Llama whose MLPs are mixtures of experts, all or some."""
    names = {
        "router": f"{block}.{router}",
        "router_correction": f"{block}.{router}.e_score_correction_bias",
        "experts_up": f"{block}.experts.gate_up_proj",
        "experts_down": f"{block}.experts.down_proj",
    }
    return _llama_like(**names, **overrides)


def _shared(module: str) -> dict[str, str]:
    return {f"shared_{name}": f"{module}.{name}_proj" for name in ("gate", "up", "down")}


def _latent(config: PreTrainedConfig) -> dict[str, Any]:
    """DeepSeek's latent attention; the cache has the heads of the latent."""
    rope = config.rope_parameters
    plain = config.qk_nope_head_dim
    rotated = config.qk_rope_head_dim
    stretch = 1.0
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim", 0) and rope["factor"] > 1:
        stretch = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0
    return {
        "latent": {
            "size": config.kv_lora_rank,
            "rotated_dims": rotated,
            "plain_dims": plain,
            "value_dims": config.v_head_dim,
            "norm_eps": 1e-6,
        },
        "kv_heads": 1,
        "head_dim": config.kv_lora_rank + rotated,
        "scale": (plain + rotated) ** -0.5 * stretch**2,
        "interleaved_rotary": getattr(config, "rope_interleave", True),
    }


def _minicpm3(config: PreTrainedConfig) -> dict[str, Any]:
    scales = {"embed_scale": config.scale_emb, "residual_scale": config.scale_depth / config.num_hidden_layers**0.5}
    return {**_latent(config), **scales, "interleaved_rotary": False}


def _with_latents(names: dict[str, str]) -> dict[str, str]:
    attention = "model.layers.{}.self_attn."
    return {
        **_without(names, "q", "k", "v", "q_norm", "k_norm"),
        "q_down": f"{attention}q_a_proj",
        "q_down_norm": f"{attention}q_a_layernorm",
        "latent_q": f"{attention}q_b_proj|{attention}q_proj",
        "kv_down": f"{attention}kv_a_proj_with_mqa",
        "kv_down_norm": f"{attention}kv_a_layernorm",
        "kv_up": f"{attention}kv_b_proj",
    }


_QWEN2_MOE = _moe_like(**_shared("mlp.shared_expert"), shared_router="mlp.shared_expert_gate")
_GLM4_MOE = _moe_like(**_shared("mlp.shared_experts"))
_ERNIE_MOE = {**_GLM4_MOE, "router_correction": "model.layers.{}.mlp.gate.moe_statics.e_score_correction_bias"}
_LLAMA4 = _moe_like(
    "feed_forward",
    "router",
    **{name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    **_shared("feed_forward.shared_expert"),
)
_FLEX_OLMO = _without(_moe_like(**_OUT_NORMS), "attention_norm", "mlp_norm")
_GRANITE_MOE = _moe_like("block_sparse_moe", "router")
_GRANITE_SHARED = _moe_like(
    "block_sparse_moe", "router", shared_gate_up="shared_mlp.input_linear", shared_down="shared_mlp.output_linear"
)

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
    "gemma": Family(
        _llama_like(), lambda c: {"norm_offset": 1.0, "norm_in_float32": True, "embed_scale": c.hidden_size**0.5}
    ),
    "ministral": _LLAMA,
    "seed_oss": _LLAMA,
    "internlm3": _LLAMA,
    "cwm": _LLAMA,
    "iquestcoder": _LLAMA,
    "arcee": Family(_PLAIN_MLP),
    "ernie4_5": Family(_llama_like(), _glm),
    "helium": Family(_llama_like(), lambda c: {"interleaved_rotary": True, "norm_in_float32": True}),
    "smollm3": Family(_llama_like(), _smollm3),
    "granite": Family(_llama_like(), _granite),
    "olmo2": Family(_POST_NORMS, _olmo2),
    "olmo3": Family(_POST_NORMS, _olmo2),
    "exaone4": Family(_POST_NORMS, _exaone4),
    "glm": Family(_GLM, _glm),
    "glm4": Family(
        {
            **_GLM,
            "attention_out_norm": "model.layers.{}.post_self_attn_layernorm",
            "mlp_out_norm": "model.layers.{}.post_mlp_layernorm",
        },
        _glm,
    ),
    "cohere": Family(_llama_like(), _cohere),
    "cohere2": Family(_llama_like(), _cohere),
    "nemotron": Family(_PLAIN_MLP, lambda c: {"norm_offset": 1.0}),
    "starcoder2": Family(_STARCODER2),
    "stablelm": Family(
        _llama_like(q_norm="self_attn.q_layernorm.norms.{head}", k_norm="self_attn.k_layernorm.norms.{head}"),
        lambda c: {"block": "parallel" if c.use_parallel_residual else "sequential", "qk_norm": "per_head"},
    ),
    "mixtral": Family(_moe_like(), experts=mixtral_experts),
    "qwen2_moe": Family(_QWEN2_MOE, experts=qwen_experts),
    "qwen3_moe": Family(_moe_like(), experts=qwen_experts),
    "phimoe": Family(_moe_like(router="router"), lambda c: {"norm": "layer"}, experts=phimoe_experts),
    "olmoe": Family(
        _moe_like(), _olmo2, experts=qwen_experts, unsupported={"clipped queries": lambda c: c.clip_qkv is not None}
    ),
    "mellum": Family(_moe_like(), experts=qwen_experts),
    "flex_olmo": Family(_FLEX_OLMO, _olmo2, experts=qwen_experts),
    "ernie4_5_moe": Family(_ERNIE_MOE, _glm, experts=ernie_experts),
    "solar_open": Family(_GLM4_MOE, experts=glm4_experts),
    "glm4_moe": Family(_GLM4_MOE, experts=glm4_experts),
    "deepseek_v3": Family(_with_latents(_GLM4_MOE), _latent, experts=glm4_experts),
    "deepseek_v2": Family(_with_latents(_GLM4_MOE), _latent, experts=deepseek_v2_experts),
    "glm4_moe_lite": Family(_with_latents(_GLM4_MOE), _latent, experts=glm4_experts),
    "minicpm3": Family(_with_latents(_llama_like()), _minicpm3),
    "youtu": Family(_with_latents(_llama_like()), _latent),
    "gpt_oss": Family(
        _moe_like(router="router", sinks="self_attn.sinks"),
        unsupported={"another slope of the experts' sigmoid": lambda c: c.swiglu_alpha != 1.702},
        experts=gpt_oss_experts,
    ),
    "llama4_text": Family(
        _LLAMA4,
        _llama4,
        {"norms behind scaled rotary positions": lambda c: c.use_qk_norm and c.rope_parameters["rope_type"] == "yarn"},
        experts=llama4_experts,
        reads_index=True,
    ),
    "granitemoe": Family(_GRANITE_MOE, _granite, experts=granite_experts),
    "granitemoeshared": Family(_GRANITE_SHARED, _granite, experts=granite_experts),
    "phi": Family(_PHI, lambda c: {"block": "parallel"}),
    "opt": Family(_OPT, _opt, {"norms without weights": lambda c: not c.layer_norm_elementwise_affine}),
    "gpt2": Family(_GPT2, _gpt2, {"cross attention": lambda c: c.add_cross_attention}),
    "gpt_neox": Family(_NEOX, _neox),
    "bloom": Family(_BLOOM, _bloom, {"residuals after the norm": lambda c: c.apply_residual_connection_post_layernorm}),
    "falcon": Family(_FALCON, _falcon),
}
