"""Configs of published models, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

_QWEN25 = {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1e6}
_QWEN3 = {"vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128, "rope_theta": 1e6}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 5e5}
_LLAMA31 = {
    **_LLAMA3,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "num_key_value_heads": 8,
}
_OPT = {"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048}
_QWEN25_HALF = {
    **_QWEN25,
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _QWEN25_HALF,
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN25_HALF,
    "Qwen/Qwen2.5-7B-Instruct": {
        **_QWEN25,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-4B": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-30B-A3B": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        **_LLAMA3,
        "max_position_embeddings": 131072,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "meta-llama/Meta-Llama-3-8B": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA31,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "meta-llama/Llama-3.1-70B-Instruct": {
        **_LLAMA31,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "facebook/opt-1.3b": {
        **_OPT,
        "hidden_size": 2048,
        "word_embed_proj_dim": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
    },
    "facebook/opt-350m": {
        **_OPT,
        "hidden_size": 1024,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
}
"""The config of each model by its hub name, from the config.json that its authors publish."""


def write_shape(name: str, folder: Path) -> str:
    """A folder with the config of a published model and no weights."""
    AutoConfig.for_model(**PUBLISHED[name]).save_pretrained(folder)
    return str(folder)
