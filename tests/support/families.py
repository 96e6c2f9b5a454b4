"""A tiny random model for each row of the family table, and for its variants."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_rlhf.models.families import FAMILIES
from tests.support.tiny import VOCABULARY

COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 2, "eos_token_id": 2, "bos_token_id": 1}
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128}
GQA = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.3, 1.7, 2.0],
    "long_factor": [2.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 64,
}
FALCON = {**SMALL, "ffn_hidden_size": 80}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
CONVOLUTIONS = {**GQA, "layer_types": ["conv", "full_attention", "conv"]}
GEMMA4 = {
    **GQA,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
LATENT = {
    **SMALL,
    "intermediate_size": 48,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
}
GROUPED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
LLAMA4 = {**GQA, "head_dim": 8, "intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 4}
HYBRID = {**GQA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 4}
FALCON_H1 = {
    "head_dim": 8,
    "mamba_d_ssm": 64,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [1.3, 0.6],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.4,
    "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {**GQA, "tie_word_embeddings": True}),
    "llama with biases": ("llama", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "llama of three heads": ("llama", {**GQA, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "llama 3 rope": (
        "llama",
        {
            **GQA,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "yarn": ("qwen2", {**GQA, "rope_parameters": YARN}),
    "mistral": ("mistral", {**GQA, "sliding_window": 6}),
    "qwen2": ("qwen2", GQA),
    "qwen2 with some windows": (
        "qwen2",
        {**GQA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**GQA, "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            **GQA,
            "head_dim": 16,
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": ("gemma3_text", {**GQA, "head_dim": 16, "sliding_window": 6, "layer_types": WINDOWS}),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4 that shares keys": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "global_head_dim": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4 whose keys are values": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma4 with experts": (
        "gemma4_text",
        {
            **GEMMA4,
            **EXPERTS,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "vocab_size_per_layer_input": VOCABULARY + 8,
        },
    ),
    "gemma4 unified": (
        "gemma4_unified_text",
        {key: value for key, value in GEMMA4.items() if "per_layer_input" not in key},
    ),
    "phi3": ("phi3", {**GQA, "sliding_window": 7}),
    "phi3 partial rotary": (
        "phi3",
        {
            **GQA,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3 longrope": ("phi3", {**GQA, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64}),
    "opt": ("opt", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt 350m": ("opt", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "gpt2": ("gpt2", GPT2),
    "gpt2 scaled by layer": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "pythia": ("gpt_neox", {**SMALL, "intermediate_size": 48}),
    "gpt_neox in sequence": ("gpt_neox", {**SMALL, "intermediate_size": 48, "use_parallel_residual": False}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "bloom of six heads": ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 6}),
    **{name: (name, GQA) for name in ("arcee", "ernie4_5", "internlm3", "seed_oss", "starcoder2")},
    **{name: (name, {**GQA, "pad_token_id": 2}) for name in ("gemma", "glm", "glm4", "olmo2")},
    "olmo2 of four KV heads": ("olmo2", {**GQA, "num_key_value_heads": 4, "pad_token_id": 2}),
    "helium": ("helium", {**GQA, "head_dim": 8}),
    "ministral": ("ministral", {**GQA, "head_dim": 8, "sliding_window": 6}),
    "smollm3": ("smollm3", {**GQA, "no_rope_layers": [1, 0, 1]}),
    "granite": ("granite", {**GQA, **GRANITE}),
    "olmo3": ("olmo3", {**GQA, "sliding_window": 6, "layer_types": WINDOWS}),
    "exaone4": ("exaone4", {**GQA, "sliding_window": 6, "layer_types": WINDOWS}),
    "cohere": ("cohere", {**GQA, "logit_scale": 2.0}),
    "cohere2": ("cohere2", {**GQA, "logit_scale": 4.0, "head_dim": 8, "sliding_window": 6, "layer_types": WINDOWS}),
    "nemotron": ("nemotron", {**GQA, "head_dim": 8}),
    "stablelm": ("stablelm", GQA),
    "stablelm in parallel": ("stablelm", {**GQA, "use_parallel_residual": True, "use_qkv_bias": True}),
    "stablelm with norms of each head": ("stablelm", {**GQA, "qk_layernorm": True}),
    "cohere with norms of each head": ("cohere", {**GQA, "logit_scale": 2.0, "use_qk_norm": True}),
    "phi": ("phi", GQA),
    "phi with norms of each head": ("phi", {**GQA, "qk_layernorm": True}),
    "phimoe": ("phimoe", {**GQA, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    "phimoe that mixes near experts": ("phimoe", {**GQA, "num_local_experts": 6, "router_jitter_noise": 0.3}),
    "phimoe longrope": (
        "phimoe",
        {**GQA, "num_local_experts": 4, "rope_parameters": {**LONG_ROPE, "short_mscale": 1.2, "long_mscale": 1.5}},
    ),
    "mixtral": ("mixtral", {**GQA, "num_local_experts": 4}),
    "mixtral with windows": ("mixtral", {**GQA, "num_local_experts": 4, "sliding_window": 20}),
    "qwen2_moe": ("qwen2_moe", {**GQA, **EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {**GQA, **EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**GQA, **EXPERTS, "norm_topk_prob": True}),
    "glm4_moe": (
        "glm4_moe",
        {
            **GQA,
            **GROUPED_EXPERTS,
            "head_dim": 8,
            "use_qk_norm": True,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **GQA,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "use_bias": True,
        },
    ),
    "solar_open": ("solar_open", {**GQA, **GROUPED_EXPERTS, "head_dim": 8}),
    "mellum": ("mellum", {**GQA, **EXPERTS, "head_dim": 8, "sliding_window": 6, "layer_types": WINDOWS}),
    "flex_olmo": ("flex_olmo", {**GQA, **EXPERTS, "norm_topk_prob": True}),
    "cwm": ("cwm", {**GQA, "head_dim": 8, "sliding_window": 6, "layer_types": WINDOWS}),
    "iquestcoder": ("iquestcoder", GQA),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **GROUPED_EXPERTS, "first_k_dense_replace": 1}),
    "deepseek_v2": (
        "deepseek_v2",
        {**LATENT, **GROUPED_EXPERTS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v2 greedy, yarn": (
        "deepseek_v2",
        {
            **LATENT,
            **GROUPED_EXPERTS,
            "topk_method": "greedy",
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT, **GROUPED_EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "youtu": ("youtu", LATENT),
    "minicpm3": ("minicpm3", {**LATENT, "dim_model_base": 64}),
    "gpt_oss": (
        "gpt_oss",
        {
            **GQA,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": WINDOWS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **LLAMA4,
            "moe_layers": [0, 2],
            "num_experts_per_tok": 2,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 6,
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
    ),
    "llama4 in one chunk": (
        "llama4_text",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "granitemoe": ("granitemoe", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 0.5}),
    "granitemoeshared": (
        "granitemoeshared",
        {
            **GQA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "logits_scaling": 0.5,
        },
    ),
    "falcon 7b": ("falcon", {**FALCON, "new_decoder_architecture": False, "multi_query": True}),
    "falcon 40b": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon rw": (
        "falcon",
        {
            **FALCON,
            "new_decoder_architecture": False,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {**HYBRID, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3_5": ("qwen3_5_text", {**HYBRID, **DELTA}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**HYBRID, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 40}),
    "granite 4": (
        "granitemoehybrid",
        {
            **HYBRID,
            **MAMBA,
            "num_local_experts": 4,
            "shared_intermediate_size": 40,
            **GRANITE,
            "position_embedding_type": "rope",
        },
    ),
    "granite 4 without experts or positions": (
        "granitemoehybrid",
        {**HYBRID, **MAMBA, "num_local_experts": 0, "shared_intermediate_size": 40},
    ),
    "bamba": ("bamba", {**GQA, **MAMBA, "attn_layer_indices": [1], "mamba_n_groups": 1}),
    "falcon_h1": ("falcon_h1", {**GQA, **MAMBA, **FALCON_H1}),
    "falcon_h1 with a norm after the gate": (
        "falcon_h1",
        {**GQA, **MAMBA, **FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mlp_bias": True},
    ),
    "falcon_h1 with a norm before the gate": ("falcon_h1", {**GQA, **MAMBA, **FALCON_H1, "mamba_rms_norm": True}),
    "jamba": (
        "jamba",
        {
            **GQA,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 6,
            "mamba_dt_rank": 5,
            "mamba_proj_bias": False,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **{name: size for name, size in GQA.items() if name != "num_hidden_layers"},
            **GROUPED_EXPERTS,
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 6,
            "chunk_size": 4,
            "moe_shared_expert_intermediate_size": 40,
            "time_step_min": 0.5,
        },
    ),
    "lfm2": ("lfm2", {**CONVOLUTIONS, "block_multiple_of": 8}),
    "lfm2 of a given width": ("lfm2", {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.5}),
    "minimax": (
        "minimax",
        {
            **HYBRID,
            "head_dim": 8,
            "num_local_experts": 4,
            "block_size": 4,
            "full_attn_alpha_factor": 1.3,
            "full_attn_beta_factor": 0.7,
            "linear_attn_alpha_factor": 0.8,
            "linear_attn_beta_factor": 1.4,
            "mlp_alpha_factor": 1.2,
            "mlp_beta_factor": 0.9,
        },
    ),
}

EXPERT_VARIANTS = [
    name
    for name, (family, settings) in VARIANTS.items()
    if FAMILIES[family].experts is not None
    and settings.get("num_local_experts") != 0
    and (FAMILIES[family] is not FAMILIES["gemma4_text"] or settings.get("enable_moe_block"))
]
"""Those with a mixture of experts."""


def variant(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model whose every weight, biases and norms too, matters; `changes`: of its config."""
    family, settings = VARIANTS[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**COMMON, **settings, **changes})
    # sdpa leaves out Gemma 2's soft cap
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(config, **attention).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.1)
        elif name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model
