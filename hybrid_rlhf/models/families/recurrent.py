"""Rows of the family table for models with recurrent layers, alone or beside attention.

The names of a row are those of the attention-only family that it extends, plus the names of the recurrent layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from hybrid_rlhf.models.families.experts import (
    jamba_experts,
    lfm2_experts,
    nemotron_h_experts,
    qwen3_5_experts,
)
from hybrid_rlhf.models.families.family import Family
from hybrid_rlhf.models.families.table import FAMILIES as ATTENTION_FAMILIES

_LAYER = "model.layers.{}."


def _named(family: str, prefix: str, **modules: str) -> dict[str, str]:
    """The names of a family with `modules` added to each layer; `prefix` is added to those of the recurrent layer."""
    added = {
        role: _LAYER + (f"{prefix}.{module}" if role.startswith("recurrent_") else module)
        for role, module in modules.items()
    }
    return {**ATTENTION_FAMILIES[family].names, **added}


_DELTA = {
    "recurrent_conv": "conv1d",
    "recurrent_decay": "A_log",
    "recurrent_dt": "dt_bias",
    "recurrent_norm": "norm",
    "recurrent_out": "out_proj",
}
_MAMBA2 = {**_DELTA, "recurrent_in": "in_proj", "recurrent_skip": "D"}
_QWEN_NEXT = {**_DELTA, "recurrent_qkvz": "in_proj_qkvz", "recurrent_ba": "in_proj_ba"}
_QWEN_3_5 = {**_DELTA, **{f"recurrent_{name}": f"in_proj_{name}" for name in ("qkv", "z", "b", "a")}}
_MAMBA = {
    **{role: module for role, module in _MAMBA2.items() if role != "recurrent_norm"},
    "recurrent_select": "x_proj",
    "recurrent_dt": "dt_proj",
    **{f"recurrent_{name}_norm": f"{name}_layernorm" for name in ("dt", "b", "c")},
}
_FEED_FORWARD = {
    "mlp_norm": "pre_ff_layernorm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}


def _qwen(config: PreTrainedConfig) -> dict[str, Any]:
    return {"norm_offset": 1.0, "norm_in_float32": True, "gated_attention": True}


def _gated_delta(config: PreTrainedConfig, *, grouped: bool = False) -> tuple[str, dict[str, Any]]:
    return "gated_delta", {
        "key_heads": config.linear_num_key_heads,
        "value_heads": config.linear_num_value_heads,
        "key_dim": config.linear_key_head_dim,
        "value_dim": config.linear_value_head_dim,
        "width": config.linear_conv_kernel_dim,
        "grouped": grouped,
    }


def _mamba2(config: PreTrainedConfig) -> tuple[str, dict[str, Any]]:
    return "mamba2", {
        "heads": config.mamba_n_heads,
        "head_dim": config.mamba_d_head,
        "groups": config.mamba_n_groups,
        "state_dim": config.mamba_d_state,
        "width": config.mamba_d_conv,
    }


def _mamba(config: PreTrainedConfig) -> tuple[str, dict[str, Any]]:
    return "mamba", {
        "inner": config.mamba_expand * config.hidden_size,
        "state_dim": config.mamba_d_state,
        "rank": config.mamba_dt_rank,
        "width": config.mamba_d_conv,
    }


def _lfm2(config: PreTrainedConfig) -> dict[str, Any]:
    size = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        unit = config.block_multiple_of
        if config.block_ffn_dim_multiplier is not None:
            size = -(-int(config.block_ffn_dim_multiplier * size) // unit) * unit
    return {"norm": "rms", "activation": "silu", "mlp_size": size}


def _minimax(config: PreTrainedConfig) -> dict[str, Any]:
    names = ("full_attn", "linear_attn", "mlp")
    carried, added = (
        tuple(float(getattr(config, f"{name}_{kind}_factor")) for name in names) for kind in ("alpha", "beta")
    )
    scales = dict(zip(("o", "recurrent_out", "experts_down"), added, strict=True))
    return {"block": "normed", "carried": carried, "weight_scales": scales}


def _lightning(config: PreTrainedConfig) -> tuple[str, dict[str, Any]]:
    heads = config.num_attention_heads
    layers = config.num_hidden_layers
    rates = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
    factors = 1 - torch.arange(layers) / (layers - 1 + 1e-5) + 1e-5
    return "lightning", {
        "heads": heads,
        "head_dim": config.head_dim or config.hidden_size // heads,
        "rates": factors[:, None] * rates,
        "norm_eps": 1e-6,
    }


def _limits_steps(config: PreTrainedConfig) -> bool:
    return tuple(config.time_step_limit or ()) not in ((), (0.0, float("inf")))


_MAMBA2_UNSUPPORTED = {"limited time steps": _limits_steps}


def _granite_hybrid(config: PreTrainedConfig) -> dict[str, Any]:
    """Without experts, the shared experts are the MLP."""
    return {**ATTENTION_FAMILIES["granite"].settings(config), "mlp_size": config.shared_intermediate_size}


def _falcon_h1(config: PreTrainedConfig) -> dict[str, Any]:
    """Its factors are multiplied into weights: a factor of a product's input becomes a factor of the weight."""
    into = config.attention_in_multiplier
    (gate, down) = config.mlp_multipliers
    kind = _falcon_h1_mixer(config)[1]
    inner = kind["heads"] * kind["head_dim"]
    shared = kind["groups"] * kind["state_dim"]
    parts = torch.tensor([inner, inner, shared, shared, kind["heads"]])
    return {
        "embed_scale": config.embedding_multiplier,
        "weight_scales": {
            "q": into,
            "k": into * config.key_multiplier,
            "v": into,
            "o": config.attention_out_multiplier,
            "gate": gate,
            "down": down,
            "recurrent_in": config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers).repeat_interleave(parts),
            "recurrent_out": config.ssm_out_multiplier,
        },
    }


def _multiplies_before_biases(config: PreTrainedConfig) -> bool:
    in_attention = config.attention_bias and config.attention_in_multiplier != 1
    return in_attention or (config.mamba_proj_bias and config.ssm_in_multiplier != 1)


def _falcon_h1_mixer(config: PreTrainedConfig) -> tuple[str, dict[str, Any]]:
    norm = "none"
    if config.mamba_rms_norm:
        norm = "before_gate" if config.mamba_norm_before_gate else "gated"
    return "mamba2", {**_mamba2(config)[1], "norm": norm}


def _nemotron_h(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "block": "single",
        "norm": "rms",
        "norm_in_float32": True,
        "activation": config.mlp_hidden_act,
        "recurrent_activation": config.mamba_hidden_act,
    }


def _nemotron_h_mixer(config: PreTrainedConfig) -> tuple[str, dict[str, Any]]:
    return "mamba2", {
        "heads": config.mamba_num_heads,
        "head_dim": config.mamba_head_dim,
        "groups": config.n_groups,
        "state_dim": config.ssm_state_size,
        "width": config.conv_kernel,
        "least_step": config.time_step_min,
    }


_NEMOTRON_H = {
    "embed": "model.embeddings",
    "final_norm": "model.norm_f",
    "head": "lm_head",
    "attention_norm": f"{_LAYER}norm",
    **{role: f"{_LAYER}mixer.{role}_proj" for role in ("q", "k", "v", "o", "up", "down")},
    **{role: f"{_LAYER}mixer.{module}" for role, module in _MAMBA2.items()},
    "router": f"{_LAYER}mixer.gate",
    "router_correction": f"{_LAYER}mixer.gate.e_score_correction_bias",
    "experts_up": f"{_LAYER}mixer.experts.up_proj",
    "experts_down": f"{_LAYER}mixer.experts.down_proj",
    "shared_up": f"{_LAYER}mixer.shared_experts.up_proj",
    "shared_down": f"{_LAYER}mixer.shared_experts.down_proj",
}
_QWEN_NEXT_FAMILY = Family(
    _named("qwen2_moe", "linear_attn", **_QWEN_NEXT),
    _qwen,
    experts=ATTENTION_FAMILIES["qwen2_moe"].experts,
    recurrence=lambda c: _gated_delta(c, grouped=True),
)
_BAMBA = {**_named("llama", "mamba", **_MAMBA2, **_FEED_FORWARD), "final_norm": "model.final_layernorm"}
_LFM2_FAMILY = Family(
    {
        **_named(
            "llama",
            "conv",
            attention_norm="operator_norm",
            mlp_norm="ffn_norm",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            o="self_attn.out_proj",
            gate="feed_forward.w1",
            up="feed_forward.w3",
            down="feed_forward.w2",
            recurrent_in="in_proj",
            recurrent_conv="conv",
            recurrent_out="out_proj",
        ),
        "final_norm": "model.embedding_norm",
    },
    _lfm2,
    recurrence=lambda c: ("short_convolution", {"channels": c.hidden_size, "width": c.conv_L_cache}),
)
RECURRENT_FAMILIES: dict[str, Family] = {
    "qwen3_next": _QWEN_NEXT_FAMILY,
    "qwen3_5_text": Family(_named("qwen3", "linear_attn", **_QWEN_3_5), _qwen, recurrence=_gated_delta),
    "qwen3_5_moe_text": replace(
        _QWEN_NEXT_FAMILY,
        names=_named("qwen2_moe", "linear_attn", **_QWEN_3_5),
        experts=qwen3_5_experts,
        recurrence=_gated_delta,
    ),
    "granitemoehybrid": Family(
        _named(
            "granitemoeshared",
            "mamba",
            gate_up="shared_mlp.input_linear",
            down="shared_mlp.output_linear",
            **_MAMBA2,
        ),
        _granite_hybrid,
        _MAMBA2_UNSUPPORTED,
        experts=ATTENTION_FAMILIES["granitemoeshared"].experts,
        recurrence=_mamba2,
    ),
    "bamba": Family(_BAMBA, unsupported=_MAMBA2_UNSUPPORTED, recurrence=_mamba2),
    "falcon_h1": Family(
        _BAMBA,
        _falcon_h1,
        {
            **_MAMBA2_UNSUPPORTED,
            "biases after multiplied inputs": _multiplies_before_biases,
        },
        recurrence=_falcon_h1_mixer,
    ),
    "jamba": Family(
        _named(
            "mixtral",
            "mamba",
            **_MAMBA,
            **_FEED_FORWARD,
            router="feed_forward.router",
            experts_up="feed_forward.experts.gate_up_proj",
            experts_down="feed_forward.experts.down_proj",
        )
        | {"final_norm": "model.final_layernorm"},
        experts=jamba_experts,
        recurrence=_mamba,
    ),
    "nemotron_h": Family(
        _NEMOTRON_H,
        _nemotron_h,
        {"experts of a latent": lambda c: c.moe_latent_size is not None},
        experts=nemotron_h_experts,
        recurrence=_nemotron_h_mixer,
    ),
    "lfm2": _LFM2_FAMILY,
    "lfm2_moe": replace(
        _LFM2_FAMILY,
        names={
            **_LFM2_FAMILY.names,
            "router": f"{_LAYER}feed_forward.gate",
            "router_correction": f"{_LAYER}feed_forward.expert_bias",
            "experts_up": f"{_LAYER}feed_forward.experts.gate_up_proj",
            "experts_down": f"{_LAYER}feed_forward.experts.down_proj",
        },
        settings=lambda c: {"norm": "rms", "activation": "silu"},
        experts=lfm2_experts,
    ),
    "minimax": Family(
        _named(
            "qwen3_moe",
            "self_attn",
            recurrent_qkv="qkv_proj",
            recurrent_gate="output_gate",
            recurrent_norm="norm",
            recurrent_out="out_proj",
        ),
        _minimax,
        experts=ATTENTION_FAMILIES["mixtral"].experts,
        recurrence=_lightning,
    ),
}
