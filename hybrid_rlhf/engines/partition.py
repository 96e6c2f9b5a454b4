"""Full weights gathered from ZeRO-3's partitions while they are needed. A no-op for models without partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import deepspeed
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.engines.deepspeed_internals import full_elements, is_partitioned
from hybrid_rlhf.models.lora import base_weight, lora_layers, merged_weight, plain_name, weights_of
from hybrid_rlhf.models.structure import backbone_of
from hybrid_rlhf.runtime.world import World


def has_partitions(module: nn.Module) -> bool:
    """Whether ZeRO-3 partitions a module's parameters."""
    return any(is_partitioned(parameter) for parameter in module.parameters())


@contextlib.contextmanager
def gathered(parameters: Iterable[nn.Parameter], *, writer_rank: int | None = None) -> Iterator[None]:
    """Gather parameters; every rank must enter.

    Args:
        parameters: partitioned or not.
        writer_rank: the rank whose changes to them are kept; none: they are only read.
    """
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=writer_rank, enabled=bool(partitioned)):
        yield


@dataclass(frozen=True)
class GatheredWeight:
    """A weight of the base model, gathered for the moment."""

    name: str
    """Its name in the Hugging Face model."""
    parameter: nn.Parameter
    adapter: LoraLayer | None
    """The LoRA layer whose base weight it is."""

    def merged(self) -> Tensor:
        """Its value, with the adapter merged into a copy if there is one."""
        return self.parameter.detach() if self.adapter is None else merged_weight(self.adapter)

    @property
    def is_copy(self) -> bool:
        """Whether `merged` is new memory."""
        return self.adapter is not None

    @property
    def is_persistent(self) -> bool:
        """Whether the memory of `merged` outlives the gathering."""
        return self.is_copy or not is_partitioned(self.parameter)


def base_parameters(lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A model's weights under their Hugging Face names: tied ones once, adapters excluded."""
    for name, parameter in lm.named_parameters():
        if ".lora_" not in name:
            yield plain_name(name), parameter


def adapted_layers(lm: nn.Module) -> dict[int, LoraLayer]:
    """The layers with adapters, by the id of the weight that they adapt."""
    return {id(base_weight(layer)): layer for _, layer in lora_layers(lm)}


def full_weights(lm: nn.Module, *, bucket_elements: int) -> Iterator[GatheredWeight]:
    """A model's weights one by one, each gathered until the next; every rank must iterate over all of them.

    Args:
        lm: partitioned or not, with adapters or without.
        bucket_elements: most elements gathered at once; a larger weight is gathered alone.
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
                yield from bucket
            bucket, parts, elements = [], [], 0


def full_tensors(lm: nn.Module, world: World) -> Iterator[tuple[str, Tensor | None]]:
    """A model's weights one by one under their Hugging Face names, adapters merged in.

    Every rank must iterate over all of them; only rank 0 receives tensors (on the host), so that no rank holds a full
    model. Tied weights come once.
    """
    for weight in full_weights(lm, bucket_elements=0):
        yield weight.name, weight.merged().to("cpu", copy=True).contiguous() if world.is_main else None
    persistent = set(lm.state_dict(keep_vars=True)) - {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    for name, buffer in lm.named_buffers():
        if name in persistent:
            yield name, buffer.detach().to("cpu", copy=True) if world.is_main else None


def adapter_tensors(lm: nn.Module, world: World) -> Iterator[tuple[str, Tensor | None]]:
    """A model's adapters and its trained head one by one; see `full_tensors`."""
    for name, parameter in lm.named_parameters():
        if parameter.requires_grad:
            with gathered([parameter]):
                yield name, parameter.detach().to("cpu", copy=True).contiguous() if world.is_main else None


def set_weights(parameter: nn.Parameter, values: Tensor) -> None:
    """Set the values of a parameter, partitioned or not; every rank must call."""
    with gathered([parameter], writer_rank=0), torch.no_grad():
        if parameter.numel():
            parameter.copy_(values.to(parameter))


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy a model's weights, adapters merged in, to another of its architecture; either may be partitioned.

    Every rank must call.
    """
    parameters = dict(target.named_parameters())
    for weight in full_weights(source, bucket_elements=0):
        set_weights(parameters[weight.name], weight.merged())


def share_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Let a model use the frozen backbone weights of another that was loaded from the same folder.

    Both are without partitions, and neither may change the shared weights. Adapters and heads remain separate.
    """
    weights = dict(base_parameters(backbone_of(source)))
    for name, parameter in base_parameters(backbone_of(target)):
        parameter.data = weights[name].data
