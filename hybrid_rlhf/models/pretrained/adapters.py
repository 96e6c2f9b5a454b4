"""Adapters of peft folders, merged into a model that stays as it is otherwise.

Why beside `models/lora.py`: that has one adapter, which trains. Here each folder gives new tensors for the weights
that it adapts; whoever reads the model meanwhile shares all others with the base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.pretrained.folders import reading

_NAME = "default"


@contextlib.contextmanager
def adapter_merged(model: PreTrainedModel, folder: str) -> Iterator[None]:
    """Inside, the adapted weights of a model are new tensors with the adapter of a folder merged in.

    Raises:
        UserError: when the folder has no adapter of this model that can be merged.
    """
    modules = {model.get_submodule(name): merged for name, merged in _merged_weights(model, folder).items()}
    kept = {module: module.weight for module in modules}
    for module, merged in modules.items():
        module.weight = nn.Parameter(merged, requires_grad=False)  # another object: readers keep this one
    try:
        yield
    finally:
        for module, weight in kept.items():
            module.weight = weight


@torch.no_grad()
def _merged_weights(model: PreTrainedModel, folder: str) -> dict[str, torch.Tensor]:
    if not (Path(folder) / "adapter_config.json").is_file():
        raise UserError(f"an adapter is a folder with adapter_config.json, {folder} has none: check the path")
    rule, fix = f"peft cannot read the adapter {folder} for this model", "give one that was trained on it"
    with reading(rule, fix):
        config = PeftConfig.from_pretrained(folder)
    if not isinstance(config, LoraConfig) or config.use_dora or config.modules_to_save or config.bias != "none":
        raise UserError(
            f"an adapter must be LoRA without DoRA, biases and further modules, {folder} is "
            f"{getattr(config, 'peft_type', 'another kind')}: merge it into the model and serve that"
        )
    model.requires_grad_(False)
    with reading(rule, fix):
        wrapped = PeftModel.from_pretrained(model, folder, adapter_name=_NAME, use_safetensors=True)
    try:
        return {
            name: layer.get_base_layer().weight.data + layer.get_delta_weight(_NAME)
            for name, layer in model.named_modules()
            if isinstance(layer, LoraLayer)
        }
    finally:
        wrapped.unload()
