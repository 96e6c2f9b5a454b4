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


def plain_name(name: str) -> str:
    """A weight's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


def whole_parameters(lm: nn.Module, *, bucket_elements: int) -> Iterator[tuple[str, nn.Parameter, LoraLayer | None]]:
    """A model's weights one by one, whole while they are at hand; every rank must go through all of them.

    Args:
        lm: partitioned or not, with adapters or without.
        bucket_elements: gathered at once, at most; a weight that alone is larger comes alone.

    Yields:
        the weight's Hugging Face name, the weight, and the adapted layer whose base it is, or none. Tied weights come
        once, adapters' own weights never.
    """
    adapted: dict[int, LoraLayer] = {id(layer.get_base_layer().weight): layer for _, layer in lora_layers(lm)}
    bucket: list[tuple[str, nn.Parameter, LoraLayer | None]] = []
    parts: list[nn.Parameter] = []
    elements = 0
    weights = [(name, parameter) for name, parameter in lm.named_parameters() if ".lora_" not in name]
    for number, (name, parameter) in enumerate(weights, start=1):
        layer = adapted.get(id(parameter))
        bucket.append((plain_name(name), parameter, layer))
        mine = [parameter] if layer is None else [p for n, p in layer.named_parameters() if n != "base_layer.bias"]
        parts += mine
        elements += sum(_elements(part) for part in mine)
        if number == len(weights) or elements + _elements(weights[number][1]) > bucket_elements:
            with gathered(parts):
                yield from bucket
            bucket, parts, elements = [], [], 0


def _elements(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_tensors(lm: nn.Module, world: World) -> Iterator[tuple[str, Tensor | None]]:
    """A model's weights one by one under their Hugging Face names, adapters merged in.

    Every rank must go through all of them; only rank 0 receives tensors (on the host), so that no rank ever holds
    a whole model. Tied weights come once.
    """
    for name, parameter, layer in whole_parameters(lm, bucket_elements=0):
        tensor = None
        if world.is_main:
            whole = parameter.detach() if layer is None else merged_weight(layer)
            tensor = whole.to("cpu", copy=True).contiguous()
        yield name, tensor
    persistent = set(lm.state_dict(keep_vars=True)) - {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    for name, buffer in lm.named_buffers():
        if name in persistent:
            yield name, buffer.detach().to("cpu", copy=True) if world.is_main else None


def set_weights(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter, partitioned or not, the same values on every rank."""
    with gathered([parameter], writer_rank=0), torch.no_grad():
        if parameter.numel():
            parameter.copy_(values.to(parameter))
