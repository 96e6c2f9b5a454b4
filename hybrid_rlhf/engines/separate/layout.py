"""What the actor's ranks hold of each weight, and what the ranks that sample need of it.

The actor's first rank describes the model to the ranks that sample: these have none, and need neither its code nor its
files. Adapters are tensors of their own beside the weight that they change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.engines.deepspeed_internals import full_elements, full_shape, partition_of
from hybrid_rlhf.engines.partition import base_parameters
from hybrid_rlhf.engines.saved.fragments import local_values
from hybrid_rlhf.engines.separate.intervals import Runs, needed_runs
from hybrid_rlhf.generation.engine import default_stop_token_ids
from hybrid_rlhf.generation.weights.inference_weights import DescribedModel, DescribeModel, InferenceWeights
from hybrid_rlhf.generation.weights.picks import Scaled, all_of
from hybrid_rlhf.models.lora import Adapter, base_weight, lora_layers, weights_of
from hybrid_rlhf.runtime.world import World

Interval = tuple[int, int]
"""First and last element, exclusive, of a flattened tensor."""


@dataclass(frozen=True)
class SentTensor:
    """A weight or a factor of an adapter, as all ranks know it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """In training."""
    trained: bool

    @property
    def elements(self) -> int:
        """Of the whole."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class SentWeight:
    """A weight of the base model, with its adapter if there is one."""

    base: SentTensor
    adapter: Adapter | None = None
    factors: tuple[SentTensor, ...] = ()
    """A and B."""

    @property
    def tensors(self) -> tuple[SentTensor, ...]:
        """The weight and the factors of its adapter."""
        return self.base, *self.factors


@dataclass(frozen=True)
class TrainedModel:
    """What the ranks that sample need to know of the model that trains."""

    described: DescribedModel
    weights: tuple[SentWeight, ...]
    dtype: torch.dtype
    stop_token_ids: tuple[int, ...]
    """The model's own; () for one that does not generate."""

    @classmethod
    def of(cls, lm: PreTrainedModel, describe: DescribeModel = DescribedModel.of) -> TrainedModel:
        """A model, partitioned or not.

        Raises:
            NotDescribed: when the family table does not cover it.
        """
        described = describe(lm, [name for name, _ in base_parameters(lm)])
        weights = tuple(weight for weight, _ in _sent_weights(lm) if weight.base.name not in described.unread)
        stop_token_ids = default_stop_token_ids(lm) if lm.can_generate() else ()
        return cls(described, weights, next(lm.parameters()).dtype, stop_token_ids)


class HeldWeights:
    """The tensors of this rank of the actor."""

    def __init__(self, lm: PreTrainedModel, world: World) -> None:
        """Take the model, and the ranks that train it."""
        self._parameters: dict[str, nn.Parameter] = {}
        for weight, parameters in _sent_weights(lm):
            self._parameters |= {
                tensor.name: parameter for tensor, parameter in zip(weight.tensors, parameters, strict=True)
            }
        self.intervals: dict[str, Interval] = {}
        """What this rank holds of each tensor that ZeRO-3 partitions; of others it holds all."""
        for name, parameter in self._parameters.items():
            if partition_of(parameter) is not None:
                elements, size = full_elements(parameter), local_values(parameter).numel()
                # the last partitions may be padding
                self.intervals[name] = min(world.rank * size, elements), min((world.rank + 1) * size, elements)

    def flat(self, name: str) -> Tensor:
        """What this rank holds of a tensor now, flat."""
        return local_values(self._parameters[name]).detach().reshape(-1)


@dataclass(frozen=True)
class NeededWeights:
    """What a rank that samples needs, by the names of the tensors."""

    runs: Mapping[str, tuple[Runs, ...]]
    dtypes: Mapping[str, torch.dtype]
    """In which they travel, the same for all ranks."""

    @classmethod
    def of(cls, model: TrainedModel, inference: InferenceWeights, dtype: torch.dtype) -> NeededWeights:
        """For inference weights of a dtype. Factors of adapters are needed whole, as their product is computed as where
        the adapter trains: products of parts may round differently."""
        runs, dtypes = {}, {}
        for weight in model.weights:
            picks = inference.picks(weight.base.name)
            runs[weight.base.name] = needed_runs(picks, weight.base.shape)
            computed = weight.adapter is not None or any(isinstance(pick, Scaled) for pick in picks)
            narrower = dtype.itemsize < weight.base.dtype.itemsize
            dtypes[weight.base.name] = dtype if narrower and not computed else weight.base.dtype
            for factor in weight.factors:
                runs[factor.name], dtypes[factor.name] = needed_runs([all_of], factor.shape), factor.dtype
        return cls(runs, dtypes)


def _sent_weights(lm: PreTrainedModel) -> Iterator[tuple[SentWeight, list[nn.Parameter]]]:
    """A model's weights, each with its parameters: tied ones once, as in `base_parameters`."""
    layers = {id(base_weight(layer)): layer for _, layer in lora_layers(lm)}
    for name, parameter in base_parameters(lm):
        layer = layers.get(id(parameter))
        parameters = [parameter] if layer is None else weights_of(layer)
        base, *factors = (
            SentTensor(name + part, full_shape(own), own.dtype, own.requires_grad)
            for part, own in zip(("", ".lora_A", ".lora_B"), parameters, strict=False)
        )
        yield SentWeight(base, None if layer is None else Adapter.of(layer), tuple(factors)), parameters
