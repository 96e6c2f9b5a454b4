"""The part of each weight that the actor's ranks have, and the part that the sampling ranks need.

The actor's first rank describes the model to the sampling ranks, which need neither the model's code nor its files.
The factors of an adapter are separate tensors beside the weight that they change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.engines.deepspeed_internals import full_elements, full_shape, partition_of
from hybrid_rlhf.engines.partition import base_parameters, base_weights
from hybrid_rlhf.engines.saved.fragments import local_values
from hybrid_rlhf.engines.separate.intervals import Runs, needed_runs
from hybrid_rlhf.generation.engine import default_stop_token_ids
from hybrid_rlhf.generation.weights.inference_weights import DescribedModel, DescribeModel, InferenceWeights
from hybrid_rlhf.generation.weights.picks import Scaled, all_of
from hybrid_rlhf.models.lora import Adapter
from hybrid_rlhf.runtime.world import World

Interval = tuple[int, int]
"""Start and end of an interval of a flattened tensor; the end is exclusive."""


@dataclass(frozen=True)
class SentTensor:
    """Description of a weight or of a factor of an adapter, known to all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype in training."""
    trained: bool

    @property
    def elements(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class SentWeight:
    """A weight of the base model, with its adapter if there is one."""

    base: SentTensor
    adapter: Adapter | None = None
    factors: tuple[SentTensor, ...] = ()
    """Factors A and B of the adapter."""

    @property
    def tensors(self) -> tuple[SentTensor, ...]:
        """The weight and the factors of its adapter."""
        return self.base, *self.factors


@dataclass(frozen=True)
class TrainedModel:
    """Description of the trained model for the ranks that receive its weights."""

    described: DescribedModel
    weights: tuple[SentWeight, ...]
    dtype: torch.dtype
    stop_token_ids: tuple[int, ...]
    """EOS tokens of the model; empty for a model that does not generate."""

    @classmethod
    def of(cls, lm: PreTrainedModel, describe: DescribeModel = DescribedModel.of) -> TrainedModel:
        """Describe a model, partitioned or not.

        Raises:
            NotDescribed: when the family table does not cover the model.
        """
        described = describe(lm, [name for name, _ in base_parameters(lm)])
        weights = tuple(weight for weight, _ in _sent_weights(lm) if weight.base.name not in described.unread)
        stop_token_ids = default_stop_token_ids(lm) if lm.can_generate() else ()
        return cls(described, weights, next(lm.parameters()).dtype, stop_token_ids)


class HeldWeights:
    """The parts of the actor's tensors that this rank has."""

    def __init__(self, lm: PreTrainedModel, world: World) -> None:
        """Args: the model, and the ranks that train it."""
        self._parameters: dict[str, nn.Parameter] = {}
        for weight, parameters in _sent_weights(lm):
            self._parameters |= {
                tensor.name: parameter for tensor, parameter in zip(weight.tensors, parameters, strict=True)
            }
        self.intervals: dict[str, Interval] = {}
        """This rank's interval of each tensor that ZeRO-3 partitions. Other tensors are complete on each rank."""
        for name, parameter in self._parameters.items():
            if partition_of(parameter) is not None:
                elements = full_elements(parameter)
                size = local_values(parameter).numel()
                # the last partitions may be padding
                self.intervals[name] = min(world.rank * size, elements), min((world.rank + 1) * size, elements)

    def flat(self, name: str) -> Tensor:
        """Return this rank's current part of a tensor, flat."""
        return local_values(self._parameters[name]).detach().reshape(-1)


@dataclass(frozen=True)
class NeededWeights:
    """Parts that a receiving rank needs, by the name of the tensor."""

    runs: Mapping[str, tuple[Runs, ...]]
    dtypes: Mapping[str, torch.dtype]
    """Dtypes of the transfer, the same for all ranks."""

    @classmethod
    def of(cls, model: TrainedModel, inference: InferenceWeights, dtype: torch.dtype) -> NeededWeights:
        """Return the needs of inference weights of a dtype. Factors of adapters are needed whole: their product is
        computed as in training, and products of parts might round differently."""
        runs = {}
        dtypes = {}
        for weight in model.weights:
            picks = inference.picks(weight.base.name)
            runs[weight.base.name] = needed_runs(picks, weight.base.shape)
            computed = weight.adapter is not None or any(isinstance(pick, Scaled) for pick in picks)
            narrower = dtype.itemsize < weight.base.dtype.itemsize
            dtypes[weight.base.name] = dtype if narrower and not computed else weight.base.dtype
            for factor in weight.factors:
                runs[factor.name] = needed_runs([all_of], factor.shape)
                dtypes[factor.name] = factor.dtype
        return cls(runs, dtypes)


def _sent_weights(lm: PreTrainedModel) -> Iterator[tuple[SentWeight, tuple[nn.Parameter, ...]]]:
    """Yield a model's weights, each with its parameters; tied weights once, as in `base_parameters`."""
    for weight in base_weights(lm):
        base, *factors = (
            SentTensor(weight.name + part, full_shape(tensor), tensor.dtype, tensor.requires_grad)
            for part, tensor in zip(("", ".lora_A", ".lora_B"), weight.parameters, strict=False)
        )
        adapter = None if weight.adapter is None else Adapter.of(weight.adapter)
        yield SentWeight(base, adapter, tuple(factors)), weight.parameters
