"""Whole weights out of ZeRO-3's partitions, for as short as they are needed. A no-op for whole models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import deepspeed
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from hybrid_rlhf.models.lora import lora_layers, merged_weight
from hybrid_rlhf.runtime.world import World


def is_partitioned(module: nn.Module) -> bool:
    """Whether ZeRO-3 holds the module's parameters in pieces."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


@contextlib.contextmanager
def gathered(parameters: Iterable[nn.Parameter], *, writer_rank: int | None = None) -> Iterator[None]:
    """Hold the given parameters whole; every rank must enter.

    Args:
        parameters: partitioned or plain.
        writer_rank: the rank whose changes to them are kept; none: they are only read.
    """
    pieces = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(pieces, modifier_rank=writer_rank, enabled=bool(pieces)):
        yield


def whole_tensors(lm: nn.Module, world: World) -> Iterator[tuple[str, Tensor | None]]:
    """A model's weights one by one under their Hugging Face names, adapters merged in.

    Every rank must go through all of them; only rank 0 receives tensors (on the host), so that no rank ever holds
    a whole model. Tied weights come once.
    """
    adapted: dict[int, LoraLayer] = {id(layer.get_base_layer().weight): layer for _, layer in lora_layers(lm)}
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            continue
        layer = adapted.get(id(parameter))
        parts = [parameter] if layer is None else [p for n, p in layer.named_parameters() if n != "base_layer.bias"]
        with gathered(parts):
            tensor = None
            if world.is_main:
                whole = parameter.detach() if layer is None else merged_weight(layer)
                tensor = whole.to("cpu", copy=True).contiguous()
        yield name.replace(".base_layer.", "."), tensor
    persistent = set(lm.state_dict(keep_vars=True)) - {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    for name, buffer in lm.named_buffers():
        if name in persistent:
            yield name, buffer.detach().to("cpu", copy=True) if world.is_main else None


def set_weights(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter, partitioned or not, the same values on every rank."""
    with gathered([parameter], writer_rank=0), torch.no_grad():
        if parameter.numel():
            parameter.copy_(values.to(parameter))
