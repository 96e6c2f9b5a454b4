"""Folders of tiny random models with a tower for images: as transformers saves them, or under names of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.core_model_loading import revert_weight_conversion

from tests.support.tiny import VOCABULARY, tiny_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.2,
}
_BLOCKS: dict[str, Any] = {"depth": 2, "num_heads": 4, "out_hidden_size": 32, **_VISION}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
TYPES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": _TEXT, "vision_config": {**_VISION, "vision_use_head": False}},
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "mllama": {
        "text_config": {**_TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {
            **_VISION,
            "num_global_layers": 1,
            "attention_heads": 4,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
        },
    },
    "qwen2_5_vl": {"text_config": {**_TEXT, "rope_parameters": _AXES}, "vision_config": _BLOCKS},
    "qwen3_5": {"text_config": {**_TEXT, **_RECURRENT}, "vision_config": _BLOCKS},
}
PROCESSOR_FILES = {
    "preprocessor_config.json": '{"image_processor_type":   "AnyImageProcessor", "image_seq_len": 64}\n',
    "processor_config.json": '{ "processor_class": "AnyProcessor" }',
    "video_preprocessor_config.json": '{"fps": 2}',
}
"""Contents that a processor of transformers would write in another form."""


def save_with_tower(folder: Path, model_type: str, *, hub_names: bool = False) -> Path:
    """A model, its tokenizer and processor in a folder, which is returned.

    Args:
        folder: the folder.
        model_type: one of TYPES.
        hub_names: name weights as in files of earlier transformers, which many repositories have; false: as in memory.
    """
    torch.manual_seed(0)
    lm = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(model_type, **TYPES[model_type])).eval()
    lm.generation_config.eos_token_id = 2
    lm.save_pretrained(folder)
    weights = {name: weight.detach().clone() for name, weight in lm.named_parameters()}
    save_file(
        revert_weight_conversion(lm, weights) if hub_names else weights, folder / "model.safetensors", {"format": "pt"}
    )
    tiny_tokenizer().save_pretrained(folder)
    for name, content in PROCESSOR_FILES.items():
        (folder / name).write_text(content)
    return folder


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder."""
    return load_file(folder / "model.safetensors")


def config_in(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, without what a run sets: dtypes, the pad token, versions."""
    set_by_runs = ("dtype", "pad_token_id", "transformers_version")

    def stripped(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: stripped(value) if isinstance(value, dict) else value
            for name, value in values.items()
            if name not in set_by_runs
        }

    return stripped(json.loads((folder / "config.json").read_text()))
