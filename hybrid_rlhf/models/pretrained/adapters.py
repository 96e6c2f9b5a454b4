"""LoRA adapters of peft folders, as the low-rank factors of the weights that they change.

Why beside `models/lora.py`: that has one adapter, which trains. Here a model stays as it is, and whoever computes with
it adds the factors (generation/model/adapters.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.pretrained.folders import reading

_NAME = "default"


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a weight of N outputs and K inputs: up @ down."""

    up: Tensor
    """[N, r], with the adapter's scale."""
    down: Tensor
    """[r, K]."""
    transposed: bool
    """Whether the weight is stored [K, N]."""


@torch.no_grad()
def read_adapter(model: PreTrainedModel, folder: str) -> dict[str, LowRank]:
    """The factors by the names of the weights; the model, whose weights are frozen, is the same afterwards.

    Raises:
        UserError: when the folder has no adapter of this model that consists of such factors.
    """
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
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]
        return {f"{name}.weight": _factors(name, layer, folder) for name, layer in layers}
    finally:
        wrapped.unload()


def _factors(name: str, layer: LoraLayer, folder: str) -> LowRank:
    base = layer.get_base_layer()
    if not isinstance(base, (nn.Linear, Conv1D)) or layer.lora_bias[_NAME]:
        raise UserError(
            f"an adapter must change linear layers without biases of its own, {folder} changes {name} "
            f"({type(base).__name__}): merge it into the model and serve that"
        )
    up, down = layer.lora_B[_NAME].weight, layer.lora_A[_NAME].weight
    return LowRank(up * layer.scaling[_NAME], down.clone(), isinstance(base, Conv1D))
