"""Mixtures of experts by family: the fields of the decoder's `Experts` (generation/architecture/model_description.py).

Configs name these fields differently. Each function takes a Hugging Face config; the family table refers to it.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


def _experts(config: PreTrainedConfig, *, count: int, **more: Any) -> dict[str, Any]:
    return {"count": count, "per_token": config.num_experts_per_tok, **more}


def qwen_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Qwen2-MoE, with shared experts; Qwen3-MoE, OLMoE and families with their config, without."""
    return _experts(
        config,
        count=config.num_experts,
        normalise=config.norm_topk_prob,
        shared_size=getattr(config, "shared_expert_intermediate_size", 0),
    )


def mixtral_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Mixtral."""
    return _experts(config, count=config.num_local_experts, normalise=True)


def phimoe_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Phi-MoE."""
    return _experts(config, count=config.num_local_experts, router="sparsemixer", near=2 * config.router_jitter_noise)


def granite_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Granite-MoE, with shared experts or without."""
    return _experts(
        config,
        count=config.num_local_experts,
        router="softmax_of_chosen",
        shared_size=getattr(config, "shared_intermediate_size", 0),
    )


def gpt_oss_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """gpt-oss."""
    return _experts(
        config,
        count=config.num_local_experts,
        router="softmax_of_chosen",
        clamp=config.swiglu_limit,
        transposed=True,
        alternating=True,
    )


def llama4_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Llama 4."""
    return _experts(
        config,
        count=config.num_local_experts,
        router="sigmoid_of_chosen",
        weighs_inputs=True,
        shared_size=config.intermediate_size,
        transposed=True,
    )


def glm4_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """GLM-4-MoE and DeepSeek-V3."""
    return _experts(
        config,
        count=config.n_routed_experts,
        router="sigmoid",
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        groups=config.n_group,
        chosen_groups=config.topk_group,
        shared_size=config.moe_intermediate_size * config.n_shared_experts,
    )


def ernie_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """ERNIE 4.5; the correction of the choice of experts is a weight that training leaves unchanged."""
    return _experts(
        config,
        count=config.moe_num_experts,
        normalise=True,
        shared_size=config.moe_intermediate_size * config.moe_num_shared_experts,
    )


def deepseek_v2_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """DeepSeek-V2; the score of a group is that of its best expert."""
    in_groups = config.topk_method == "group_limited_greedy"
    return _experts(
        config,
        count=config.n_routed_experts,
        scale=config.routed_scaling_factor,
        groups=config.n_group if in_groups else 1,
        chosen_groups=config.topk_group if in_groups else 1,
        group_scores=1,
        shared_size=config.moe_intermediate_size * config.n_shared_experts,
    )


def qwen3_5_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Qwen3.5-MoE, which always normalises the experts' weights."""
    return _experts(
        config, count=config.num_experts, normalise=True, shared_size=config.shared_expert_intermediate_size
    )


def nemotron_h_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Nemotron-H: GLM-4-MoE with a separate size of the shared experts."""
    return {**glm4_experts(config), "shared_size": config.moe_shared_expert_intermediate_size}


def lfm2_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """LFM2-MoE."""
    return _experts(
        config,
        count=config.num_experts,
        router="sigmoid",
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


def gemma4_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Gemma 4."""
    return {"count": config.num_experts, "per_token": config.top_k_experts, "normalise": True, "beside_mlp": True}


def jamba_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Jamba."""
    return _experts(config, count=config.num_experts)
