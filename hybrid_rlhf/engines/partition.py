"""Whole weights out of ZeRO-3's partitions, for as short as they are needed. A no-op for whole models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import deepspeed
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

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


@dataclass(frozen=True)
class WholeWeight:
    """A weight of the model without adapters, at hand for the moment."""

    name: str
    """In Hugging Face's model."""
    parameter: nn.Parameter
    adapter: LoraLayer | None
    """The adapted layer whose base it is."""

    def merged(self) -> Tensor:
        """Its value; with an adapter, in new memory."""
        return self.parameter.detach() if self.adapter is None else merged_weight(self.adapter)

    @property
    def is_copy(self) -> bool:
        """Whether `merged` is new memory."""
        return self.adapter is not None

    @property
    def is_lasting(self) -> bool:
        """Whether the memory of `merged` is there beyond the moment."""
        return self.is_copy or not hasattr(self.parameter, "ds_id")


def base_parameters(lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A model's weights under their Hugging Face names, tied ones once, without those of adapters."""
    for name, parameter in lm.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


def whole_weights(lm: nn.Module, *, bucket_elements: int) -> Iterator[WholeWeight]:
    """A model's weights one by one, whole while they are at hand; every rank must go through all of them.

    Args:
        lm: partitioned or not, with adapters or without.
        bucket_elements: gathered at once, at most; a weight that alone is larger comes alone.
    """
    adapted: dict[int, LoraLayer] = {id(layer.get_base_layer().weight): layer for _, layer in lora_layers(lm)}
    bucket: list[WholeWeight] = []
    parts: list[nn.Parameter] = []
    elements = 0
    weights = list(base_parameters(lm))
    for number, (name, parameter) in enumerate(weights, start=1):
        layer = adapted.get(id(parameter))
        bucket.append(WholeWeight(name, parameter, layer))
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
    for weight in whole_weights(lm, bucket_elements=0):
        yield weight.name, weight.merged().to("cpu", copy=True).contiguous() if world.is_main else None
    persistent = set(lm.state_dict(keep_vars=True)) - {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    for name, buffer in lm.named_buffers():
        if name in persistent:
            yield name, buffer.detach().to("cpu", copy=True) if world.is_main else None


def set_weights(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter, partitioned or not, the same values on every rank."""
    with gathered([parameter], writer_rank=0), torch.no_grad():
        if parameter.numel():
            parameter.copy_(values.to(parameter))


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give a model the weights of another of its architecture, adapters merged in; either may be partitioned.

    Every rank must call.
    """
    parameters = dict(target.named_parameters())
    for weight in whole_weights(source, bucket_elements=0):
        set_weights(parameters[weight.name], weight.merged())


def share_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Let the frozen weights of a backbone be those of another that started alike; adapters and heads stay apart.

    Both are whole, and in one memory from now on: neither may change them.
    """
    weights = dict(base_parameters(source.base_model))
    for name, parameter in base_parameters(target.base_model):
        parameter.data = weights[name].data
