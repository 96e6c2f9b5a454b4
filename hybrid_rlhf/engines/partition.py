"""Gathers full weights from ZeRO-3's partitions while they are needed. Does nothing for models without partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.engines.deepspeed_internals import full_elements, is_partitioned
from hybrid_rlhf.models.four_bit import FourBitWeight, is_four_bit, plain_value, share_four_bit
from hybrid_rlhf.models.lora import base_weight, four_bit_weight, lora_layers, merged_weight, plain_name, weights_of
from hybrid_rlhf.models.structure import backbone_of
from hybrid_rlhf.models.weight_split import split_of
from hybrid_rlhf.runtime.world import World

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


def has_partitions(module: nn.Module) -> bool:
    """True if ZeRO-3 partitions a module's parameters."""
    return any(is_partitioned(parameter) for parameter in module.parameters())


@contextlib.contextmanager
def gathered(parameters: Iterable[nn.Parameter], *, writer_rank: int | None = None) -> Iterator[None]:
    """Gather parameters inside the context. Every rank must enter.

    Args:
        parameters: partitioned or not.
        writer_rank: rank whose changes are kept; none: the parameters are only read.
    """
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=writer_rank, enabled=bool(partitioned)):
        yield


@dataclass(frozen=True)
class GatheredWeight:
    """A weight of the base model that is gathered at the moment."""

    name: str
    """Name in the Hugging Face model."""
    parameter: nn.Parameter
    adapter: LoraLayer | None
    """LoRA layer with this base weight; none: the weight has no adapter."""
    whole: Tensor | None = None
    """The whole value, if ranks share it in parts."""

    def with_parts(self) -> GatheredWeight:
        """Return the weight with its parts on other ranks gathered. Every rank calls."""
        split = split_of(self.parameter)
        return self if split.parts == 1 else replace(self, whole=split.whole(self.parameter))

    def merged(self) -> Tensor:
        """Return the value, with the adapter, if any, merged into a copy; dequantised if it is in 4 bits."""
        if self.whole is not None:
            return self.whole
        return plain_value(self.parameter) if self.adapter is None else merged_weight(self.adapter)

    def sampled(self) -> Tensor | FourBitWeight:
        """Return the value that inference weights are built from: `merged`, or the weight in 4 bits with its
        adapter."""
        return four_bit_weight(self.parameter, self.adapter) if is_four_bit(self.parameter) else self.merged()

    @property
    def is_copy(self) -> bool:
        """True if the memory of `sampled` does not change in training: it is new, or that of frozen 4-bit weights."""
        if is_four_bit(self.parameter):
            return not is_partitioned(self.parameter)
        return self.adapter is not None or self.whole is not None

    @property
    def is_persistent(self) -> bool:
        """True if the memory of `sampled` stays valid when the weight is released."""
        return self.is_copy or not is_partitioned(self.parameter)


def base_parameters(lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a model's weights with their Hugging Face names: tied weights once, without adapters."""
    for name, parameter in lm.named_parameters():
        if ".lora_" not in name:
            yield plain_name(name), parameter


def adapted_layers(lm: nn.Module) -> dict[int, LoraLayer]:
    """Return the layers with adapters, by the id of their base weight."""
    return {id(base_weight(layer)): layer for _, layer in lora_layers(lm)}


def full_weights(lm: nn.Module, *, bucket_elements: int) -> Iterator[GatheredWeight]:
    """Yield a model's weights one by one; each is gathered until the next. Every rank must iterate over all of them.

    Args:
        lm: partitioned or not, with or without adapters.
        bucket_elements: maximum number of elements gathered at once; a larger weight is gathered alone.
    """
    adapted = adapted_layers(lm)
    bucket: list[GatheredWeight] = []
    parts: list[nn.Parameter] = []
    elements = 0
    weights = list(base_parameters(lm))
    for number, (name, parameter) in enumerate(weights, start=1):
        layer = adapted.get(id(parameter))
        bucket.append(GatheredWeight(name, parameter, layer))
        mine = [parameter] if layer is None else weights_of(layer)
        parts += mine
        elements += sum(full_elements(part) for part in mine)
        if number == len(weights) or elements + full_elements(weights[number][1]) > bucket_elements:
            with gathered(parts):
                yield from (weight.with_parts() for weight in bucket)
            bucket = []
            parts = []
            elements = 0


def full_tensors(lm: nn.Module, world: World) -> Iterator[tuple[str, Tensor | None]]:
    """Yield a model's weights one by one with their Hugging Face names, adapters merged; tied weights once.

    Every rank must iterate over all of them. Only rank 0 receives tensors, on the host, so no device needs memory for a
    full model.
    """
    for weight in full_weights(lm, bucket_elements=0):
        yield weight.name, weight.merged().to("cpu", copy=True).contiguous() if world.is_main else None
    persistent = set(lm.state_dict(keep_vars=True)) - {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    for name, buffer in lm.named_buffers():
        if name in persistent:
            yield name, buffer.detach().to("cpu", copy=True) if world.is_main else None


def adapter_tensors(lm: nn.Module, world: World) -> Iterator[tuple[str, Tensor | None]]:
    """Yield a model's adapters and trained head one by one, as `full_tensors`."""
    for name, parameter in lm.named_parameters():
        if parameter.requires_grad:
            with gathered([parameter]):
                yield name, parameter.detach().to("cpu", copy=True).contiguous() if world.is_main else None


def set_weights(parameter: nn.Parameter, values: Tensor) -> None:
    """Set the values of a parameter, partitioned or not. Every rank must make this call."""
    with gathered([parameter], writer_rank=0), torch.no_grad():
        if parameter.numel():
            parameter.copy_(split_of(parameter).local(values).to(parameter))


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy a model's weights, adapters merged, to another model of the same architecture; both may be partitioned.

    Every rank must make this call.
    """
    parameters = dict(target.named_parameters())
    for weight in full_weights(source, bucket_elements=0):
        set_weights(parameters[weight.name], weight.merged())


def share_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Make `target` use the frozen backbone weights of `source`, which was loaded from the same folder.

    Neither model may be partitioned or change the shared weights. Adapters and heads remain separate.
    """
    weights = dict(base_parameters(backbone_of(source)))
    for name, parameter in base_parameters(backbone_of(target)):
        parameter.data = weights[name].data
        share_four_bit(weights[name], parameter)
