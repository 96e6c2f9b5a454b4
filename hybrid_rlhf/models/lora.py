"""LoRA through peft: adapters are injected into a model, disabled for the reference, merged for generation and saving.

Source: Hu et al. 2021 (arXiv 2106.09685). Deviation: the adapters' dropout is 0, like every dropout in this library.
Merged weights are always new tensors: adding to the training weights and subtracting again would drift in bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.models.pretrained.folders import reading
from hybrid_rlhf.models.pretrained.loading import Architecture

_ADAPTER = "default"


def choose_trained(
    model: PreTrainedModel, lora: LoraConfig | None, architecture: Architecture, *, learns: bool, seed: int
) -> None:
    """Choose the trained parameters: none of a frozen model, the adapters of `lora`, or all.

    Raises:
        UserError: when lora does not fit the model.
    """
    if not learns:
        model.requires_grad_(False)
    elif lora is not None:
        dtype = model.dtype
        add_lora(model, lora, architecture, seed=seed)
        for parameter in model.parameters():  # not buffers: rotary frequencies are float32 in any model
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def add_lora(model: PreTrainedModel, config: LoraConfig, architecture: Architecture, *, seed: int) -> None:
    """Inject adapters into a model and freeze the rest, except for a score head.

    Raises:
        UserError: when lora.target_modules matches no module, the head, or an embedding tied to the head.
    """
    task = TaskType.CAUSAL_LM if architecture == "causal_lm" else TaskType.SEQ_CLS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # same initial adapters however the model was loaded
        with reading(f"lora.target_modules {config.target_modules} does not fit", "name linear layers of the model"):
            inject_adapter_in_model(
                PeftLoraConfig(
                    r=config.rank,
                    lora_alpha=config.alpha,
                    target_modules=config.target_modules,
                    lora_dropout=0.0,
                    task_type=task,
                ),
                model,
                _ADAPTER,
            )
    head = model.get_output_embeddings() if architecture == "causal_lm" else model.score
    if isinstance(head, BaseTunerLayer):
        raise UserError(f"lora.target_modules must not match the head, got {config.target_modules}: remove it")
    if any(layer.get_base_layer().weight is head.weight for _, layer in lora_layers(model)):
        raise UserError(
            f"lora.target_modules must not match an embedding tied to the head, got {config.target_modules}: remove it"
        )
    if architecture == "scorer":
        head.requires_grad_(True)


def has_lora(module: nn.Module) -> bool:
    """Whether a module has adapters."""
    return any(isinstance(layer, BaseTunerLayer) for layer in module.modules())


@contextlib.contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Compute with the base model, without adapters.

    Sets peft's flag directly: its public method also changes requires_grad, which must not change once a ZeRO engine
    has grouped its parameters.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def lora_layers(module: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """The layers with adapters, with their names."""
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            yield name, layer


def merged_weight(layer: LoraLayer) -> Tensor:
    """base + scale * B @ A as a new tensor, in the shape and dtype of the base weight."""
    base: Tensor = layer.get_base_layer().weight
    with torch.no_grad():
        return base.detach() + layer.get_delta_weight(_ADAPTER).to(base.dtype)


@contextlib.contextmanager
def lora_merged(module: nn.Module) -> Iterator[None]:
    """Compute with merged weights: inside, the base layers use merged copies in place of their own weights.

    All weights must be gathered.
    """
    layers = [layer for _, layer in lora_layers(module)]
    kept = [layer.get_base_layer().weight.data for layer in layers]
    for layer in layers:
        layer.get_base_layer().weight.data = merged_weight(layer)
    try:
        with adapters_off(module):
            yield
    finally:
        for layer, data in zip(layers, kept, strict=True):
            layer.get_base_layer().weight.data = data
