"""Adapters of peft folders: merged for good, or into a model that stays as it is otherwise.

Why beside `models/lora.py`: that has one adapter, which trains. Here adapters come from folders. `merge_adapter` is for
a model that is written; with `adapter_merged` each folder gives new tensors for the weights that it adapts, and whoever
reads the model meanwhile shares all others with the base.
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

_CONFIG, _WEIGHTS, _NAME = "adapter_config.json", "adapter_model.safetensors", "default"
_FIX = "give the model that it was trained on"


@torch.no_grad()
def merge_adapter(lm: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with an adapter merged into its weights, in their dtype; the model given is used up.

    Raises:
        UserError: when the folder has no adapter in safetensors, or it does not fit the model.
    """
    wrapped = _wrapped(lm, folder, _adapter_config(folder))
    with reading(f"the adapter {folder} must be one that peft can merge", "merge it in a script"):
        merged: PreTrainedModel = wrapped.merge_and_unload(safe_merge=True)
    return merged


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
    config = _adapter_config(folder)
    if not isinstance(config, LoraConfig) or config.use_dora or config.modules_to_save or config.bias != "none":
        raise UserError(
            f"an adapter must be LoRA without DoRA, biases and further modules, {folder} is "
            f"{getattr(config, 'peft_type', 'another kind')}: merge it into the model and serve that"
        )
    model.requires_grad_(False)
    wrapped = _wrapped(model, folder, config)
    try:
        return {
            name: layer.get_base_layer().weight.data + layer.get_delta_weight(_NAME)
            for name, layer in model.named_modules()
            if isinstance(layer, LoraLayer)
        }
    finally:
        wrapped.unload()


def _adapter_config(folder: str) -> PeftConfig:
    path = Path(folder).expanduser()
    if not (path / _CONFIG).is_file():
        raise UserError(f"an adapter is a folder with {_CONFIG}, {folder} has none: check the path")
    if not (path / _WEIGHTS).is_file():  # peft would read a pickle
        raise UserError(
            f"an adapter's weights must be safetensors, {folder} has no {_WEIGHTS}: save it again with peft"
        )
    with reading(f"the adapter {folder} must have a config that peft can read", "save it again with peft"):
        return PeftConfig.from_pretrained(str(path))


def _wrapped(model: PreTrainedModel, folder: str, config: PeftConfig) -> PeftModel:
    """The model with the adapter beside its weights."""
    with reading(f"the adapter {folder} must fit {type(model).__name__}", _FIX):
        wrapped = PeftModel(model, config, _NAME)
        # PeftModel.from_pretrained only warns of weights that are missing or left over
        found = wrapped.load_adapter(str(Path(folder).expanduser()), _NAME)
        faulty = [*found.missing_keys, *found.unexpected_keys]
        if faulty:
            raise ValueError(f"{len(faulty)} weights are missing or left over, for example {faulty[0]}")
    return wrapped
