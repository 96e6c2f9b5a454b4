"""A tiny random model of every type that is loaded as a causal LM, from the type's own config.

The sizes of a config are recognised by the names of its fields, those of nested configs too; `SETTINGS` has what a type
needs besides. Windows, chunks and selections are smaller than the prompts of the tests, so that they have an effect.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.families import TOWER_FAMILIES
from hybrid_rlhf.models.pretrained.loading import auto_class

VOCABULARY = 128
MOST_WEIGHTS = 8_000_000
_FIELDS: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size",
    64: "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim lru_width attention_hidden_size "
    "input_embedding_size output_embedding_size embed_dim out_hidden_size vision_output_dim output_dim "
    "vt_hidden_size projector_input_dim projector_output_dim",
    96: "intermediate_size moe_intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim dim_ff dff ffn_hidden_size "
    "expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp "
    "dense_intermediate_size d_inner feed_forward_size moe_shared_expert_intermediate_size "
    "shared_experts_intermediate_size n_inner",
    4: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts linear_num_value_heads linear_num_heads "
    "depth num_global_layers",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk top_k_experts "
    "num_experts_per_token moe_k linear_num_key_heads index_n_heads n_group topk_group num_group num_expert_group",
    16: "head_dim attention_head_size d_head dim_head swa_head_dim attention_head_dim kv_channels kv_lora_rank "
    "q_lora_rank v_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state "
    "state_size ssm_state_size mamba_d_head mamba_head_dim index_head_dim o_lora_rank rotary_dim",
    8: "sliding_window sliding_window_size attention_window_size local_attention window_size "
    "local_attention_window_len attention_chunk_size qk_rope_head_dim mamba_dt_rank time_step_rank mamba_n_heads "
    "mamba_num_heads index_topk chunk_size mamba_chunk_size block_size block_multiple_of hidden_size_per_layer_input",
    14: "patch_size",
    24: "qk_head_dim",
    28: "image_size",
    256: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length max_target_positions",
}
SIZES = {name: size for size, names in _FIELDS.items() for name in names.split()}
_LATENT: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 4}
_HYBRID = ["linear_attention", "full_attention"] * 2
_WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_AXES = {**_ROPE, "mrope_section": [2, 3, 3]}
_GLM_AXES = {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        "axk1 axk2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 youtu".split(), _LATENT
    ),
    **dict.fromkeys("hunyuan_v1_dense hunyuan_v1_moe ministral".split(), {"head_dim": 16}),
    **dict.fromkeys(
        "paddleocr_vl_text qwen2_5_vl_text qwen2_vl_text qwen3_vl_text".split(), {"rope_parameters": _AXES}
    ),
    **dict.fromkeys("glm46v_text glm4v_moe_text glm4v_text glm_ocr_text".split(), _GLM_AXES),
    "gemma4": {
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
        }
    },
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": _WINDOWS,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        "laurel_rank": 8,
        "intermediate_size": 96,
    },
    "gemma4_text": {
        "global_head_dim": 32,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_LATENT, "layer_types": _HYBRID},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"floor_scale": 4, "attn_scale": 0.5},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "roc_bert": {
        "is_decoder": True,
        "shape_vocab_size": 50,
        "pronunciation_vocab_size": 50,
        "shape_embed_dim": 16,
        "pronunciation_embed_dim": 16,
    },
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(
        (
            "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
            "roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl"
        ).split(),
        {"is_decoder": True},
    ),
}


class NotBuilt(Exception):
    """A type of which transformers builds no tiny model; the message has the reason."""


def model_types() -> list[str]:
    """All types of transformers' causal-LM mapping, and those with towers."""
    return sorted(TOWER_FAMILIES.union(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny_of_type(model_type: str, auto: Any = None, **changes: object) -> PreTrainedModel:
    """A tiny model whose every weight matters, with logits of a standard deviation of about 1.

    Args:
        model_type: its type.
        auto: class that builds it; None: that of a causal LM.
        changes: settings of its config.

    Raises:
        NotBuilt: when transformers cannot build it.
        UserError: when the library refuses it.
    """
    try:
        kind = CONFIG_MAPPING[model_type]
        config = kind(**{**_small(kind(), model_type), "bos_token_id": 1, "eos_token_id": 2, **changes})
        auto = auto or auto_class(config, "causal_lm")
        with torch.device("meta"):
            weights = auto.from_config(copy.deepcopy(config)).num_parameters()
        if weights > MOST_WEIGHTS:
            raise NotBuilt(f"{weights:,} weights, its config has sizes that are not known here")
        torch.manual_seed(0)
        model: PreTrainedModel = auto.from_config(config).float().eval()
    except (NotBuilt, UserError):
        raise
    except Exception as error:  # whatever a config or a model raises for its own defaults
        raise NotBuilt(f"transformers cannot build it: {' '.join(str(error).split())[:120]}") from error
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                scale = 1.2 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            else:  # fresh biases are zero and would prove nothing
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("_bias"):  # corrections of routers
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


def _small(config: PreTrainedConfig, model_type: str) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        nested = vars(config).get(name)
        if isinstance(nested, PreTrainedConfig):
            small[name] = _small(nested, nested.model_type)
        elif name in SIZES and isinstance(value, (int, float)) and not isinstance(value, bool):
            small[name] = SIZES[name]
        elif name == "pad_token_id":
            small[name] = 0
    return {**small, **SETTINGS.get(model_type, {})}
