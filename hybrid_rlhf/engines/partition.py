"""Gathers full weights from ZeRO-3's partitions while they are needed. Does nothing for models without partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
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
from hybrid_rlhf.models.weight_split import WeightSplit, split_of
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
class BaseWeight:
    """A weight of the base model."""

    name: str
    """Name in the Hugging Face model."""
    parameters: tuple[nn.Parameter, ...]
    """The weight, then the factors of its adapter."""
    adapter: LoraLayer | None
    """LoRA layer with this base weight; none: the weight has no adapter."""
    split: WeightSplit | None
    """How ranks share it in parts; none: each has the whole weight."""
    is_four_bit: bool
    """True if the weight is in 4 bits."""
    whole: Tensor | None = None
    """The whole value, while it is gathered from the ranks that share it in parts."""

    @property
    def parameter(self) -> nn.Parameter:
        """The weight."""
        return self.parameters[0]

    def with_parts(self) -> BaseWeight:
        """Return the weight with its parts on other ranks gathered. Every rank calls."""
        return self if self.split is None else replace(self, whole=self.split.whole(self.parameter))

    def merged(self) -> Tensor:
        """Return the value, with the adapter, if any, merged into a copy; dequantised if it is in 4 bits."""
        if self.whole is not None:
            return self.whole
        if self.adapter is not None:
            return merged_weight(self.adapter)
        return plain_value(self.parameter) if self.is_four_bit else self.parameter.detach()

    def sampled(self) -> Tensor | FourBitWeight:
        """Return the value that inference weights are built from: `merged`, or the weight in 4 bits with its
        adapter."""
        return four_bit_weight(self.parameter, self.adapter) if self.is_four_bit else self.merged()

    @property
    def is_persistent(self) -> bool:
        """True if the memory of `sampled` stays valid when the weight is released."""
        is_new = not self.is_four_bit and (self.adapter is not None or self.whole is not None)
        return is_new or not is_partitioned(self.parameter)


def base_parameters(lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a model's weights with their Hugging Face names: tied weights once, without adapters."""
    for name, parameter in lm.named_parameters():
        if ".lora_" not in name:
            yield plain_name(name), parameter


def base_weights(lm: nn.Module) -> list[BaseWeight]:
    """Return a model's weights, partitioned or not, with or without adapters; tied weights once."""
    adapted = {id(base_weight(layer)): layer for _, layer in lora_layers(lm)}
    weights = []
    for name, parameter in base_parameters(lm):
        layer = adapted.get(id(parameter))
        parameters = [parameter] if layer is None else weights_of(layer)
        split = split_of(parameter)
        weights.append(
            BaseWeight(name, tuple(parameters), layer, None if split.parts == 1 else split, is_four_bit(parameter))
        )
    return weights


def full_weights(weights: Sequence[BaseWeight], *, bucket_elements: int) -> Iterator[BaseWeight]:
    """Yield weights one by one; each is gathered until the next. Every rank must iterate over all of them.

    Args:
        weights: those of a model.
        bucket_elements: maximum number of elements gathered at once; a larger weight is gathered alone.
    """
    bucket: list[BaseWeight] = []
    elements = 0
    for number, weight in enumerate(weights, start=1):
        bucket.append(weight)
        elements += sum(full_elements(part) for part in weight.parameters)
        if number == len(weights) or elements + full_elements(weights[number].parameter) > bucket_elements:
            with gathered([part for held in bucket for part in held.parameters]):
                yield from (held.with_parts() for held in bucket)
            bucket = []
            elements = 0


def full_tensors(lm: nn.Module, world: World) -> Iterator[tuple[str, Tensor | None]]:
    """Yield a model's weights one by one with their Hugging Face names, adapters merged; tied weights once.

    Every rank must iterate over all of them. Only rank 0 receives tensors, on the host, so no device needs memory for a
    full model.
    """
    for weight in full_weights(base_weights(lm), bucket_elements=0):
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
    for weight in full_weights(base_weights(source), bucket_elements=0):
        set_weights(parameters[weight.name], weight.merged())


def share_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Make `target` use the frozen backbone weights of `source`, which was loaded from the same folder.

    Neither model may be partitioned or change the shared weights. Adapters and heads remain separate.
    """
    weights = dict(base_parameters(backbone_of(source)))
    for name, parameter in base_parameters(backbone_of(target)):
        parameter.data = weights[name].data
        share_four_bit(weights[name], parameter)
