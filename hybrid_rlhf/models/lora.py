"""LoRA through peft: adapters put into the model in place, switched off for the reference, merged for use.

Source: Hu et al. 2021 (arXiv 2106.09685). Deviation: the adapters' own dropout is 0, like every dropout here.
Merged weights are always computed into new memory; the training weights are never added to and subtracted from, which
drifts in bfloat16.
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
from hybrid_rlhf.configs.sections import LoraConfig
from hybrid_rlhf.models.folders import reading
from hybrid_rlhf.models.loading import Architecture

_ADAPTER = "default"


def choose_trained(model: PreTrainedModel, lora: LoraConfig | None, architecture: Architecture, *, seed: int) -> None:
    """Leave what learns to learn: nothing where `lora` is none, adapters where it has a rank, else every weight.

    Raises:
        UserError: when lora does not fit the model.
    """
    if lora is None:
        model.requires_grad_(False)
    elif lora.rank > 0:
        dtype = model.dtype
        add_lora(model, lora, architecture, seed=seed)
        for parameter in model.parameters():  # and no buffer: rotary frequencies are float32 in any model
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def add_lora(model: PreTrainedModel, config: LoraConfig, architecture: Architecture, *, seed: int) -> None:
    """Put adapters into a model in place and freeze the rest, but for a score head.

    Raises:
        UserError: when no module matches lora.target_modules, or the head does, or what the head is tied to.
    """
    task = TaskType.CAUSAL_LM if architecture == "causal_lm" else TaskType.SEQ_CLS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the adapters start alike however the model was loaded
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
        raise UserError("lora.target_modules may not name the head: leave it out")
    if any(layer.get_base_layer().weight is head.weight for _, layer in lora_layers(model)):
        raise UserError("lora.target_modules may not name an embedding that is the head too: leave it out")
    if architecture == "scorer":
        head.requires_grad_(True)


def has_lora(module: nn.Module) -> bool:
    """Whether a module carries adapters."""
    return any(isinstance(layer, BaseTunerLayer) for layer in module.modules())


@contextlib.contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Compute as the base model does.

    Sets peft's switch directly: its public method also turns requires_grad off and on, which a ZeRO engine that has
    already sorted its parameters must not see.
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
    """Names and adapted layers."""
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            yield name, layer


def merged_weight(layer: LoraLayer) -> Tensor:
    """base + scale * B @ A in new memory, in the base weight's shape and dtype."""
    base: Tensor = layer.get_base_layer().weight
    with torch.no_grad():
        return base.detach() + layer.get_delta_weight(_ADAPTER).to(base.dtype)


@contextlib.contextmanager
def lora_merged(module: nn.Module) -> Iterator[None]:
    """Compute with merged weights: the base layers point at merged copies inside, and at their own memory again after.

    All weights must be whole (gathered) inside.
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
