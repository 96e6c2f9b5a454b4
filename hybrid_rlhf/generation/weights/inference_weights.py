"""Inference weights of a Hugging Face model: planned once, built each time the training weights have changed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.architecture.hugging_face import NotDescribed, describe
from hybrid_rlhf.generation.architecture.model_description import ModelDescription
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops.quantisation import Quantization
from hybrid_rlhf.generation.weights.adapters import adapter_changes
from hybrid_rlhf.generation.weights.loader import WeightLoader
from hybrid_rlhf.generation.weights.picks import Pick
from hybrid_rlhf.models.families import has_float32_logits, unread_weights
from hybrid_rlhf.models.pretrained.adapters import LowRank
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World

logger = logging.getLogger(LOGGER_NAME)


@dataclass(frozen=True)
class DescribedModel:
    """Everything needed to plan inference weights, also on a rank that does not have the model."""

    architecture: ModelDescription
    names: Mapping[str, str]
    """Module names of the family, by role."""
    parameters: tuple[str, ...]
    """Names of the weights; tied weights once."""
    unread: tuple[str, ...]
    """Weights that text does not use: those of image and audio towers."""
    float32_logits: bool

    @classmethod
    def of(cls, lm: PreTrainedModel, parameters: Iterable[str]) -> DescribedModel:
        """Describe a model, given the names of its weights, which may be partitioned.

        Raises:
            NotDescribed: when the family table does not cover the model.
        """
        named = tuple(parameters)
        return cls(*describe(lm), named, unread_weights(lm, named), has_float32_logits(lm))


DescribeModel = Callable[[PreTrainedModel, Iterable[str]], DescribedModel]
"""Describes a model, as `DescribedModel.of`."""


class InferenceWeights:
    """A model's inference weights on this rank: planned once, built each time the training weights have changed."""

    def __init__(
        self,
        model: DescribedModel,
        *,
        world: World,
        dtype: torch.dtype,
        in_place: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        """Plan the weights.

        Args:
            model: the model.
            world: the tensor-parallel ranks.
            dtype: dtype of the inference weights.
            in_place: later builds write into the weights of the first build, unless these are packed or quantised.
            quantization: quantization of the products of layers; none: they keep the dtype.

        Raises:
            NotDescribed: when the decoder does not use one of the model's weights.
            UserError: when heads cannot be split over the ranks, or products cannot be quantised.
        """
        self._world = world
        self._loader = WeightLoader(
            model.architecture,
            model.names,
            model.parameters,
            unread=model.unread,
            world=world,
            dtype=dtype,
            in_place=in_place,
            float32_logits=model.float32_logits,
            quantization=quantization,
        )
        self._decoder: Decoder | None = None

    @property
    def architecture(self) -> ModelDescription:
        """Description of the model."""
        return self._loader.architecture

    @property
    def in_place(self) -> bool:
        """True if later builds write into the weights of the first build."""
        return self._loader.in_place

    @property
    def targets(self) -> Mapping[str, Sequence[tuple[str, int, Pick]]]:
        """For each training weight: the inference weights it goes to, as (name, part index, pick)."""
        return self._loader.targets

    def picks(self, name: str) -> list[Pick]:
        """Return the functions that select this rank's parts of a full training weight."""
        return [pick for _, _, pick in self._loader.targets[name]]

    def build(self, weights: Iterable[tuple[str, Tensor, bool]]) -> Decoder:
        """Build or update the decoder.

        Args:
            weights: yields name, full tensor, and true if the tensor's memory stays unchanged after this call. An
                update in place needs only the weights that have changed.
        """
        for name, tensor, persistent in weights:
            self._loader.load(name, tensor, persistent=persistent)
        if self._decoder is not None:
            self._decoder.refresh()
            return self._decoder
        decoder = Decoder(self._loader.architecture, self._loader.assemble(), self._loader.split, self._world)
        if self._loader.in_place:
            self._decoder = decoder
        return decoder


def architecture_of(lm: PreTrainedModel) -> ModelDescription | None:
    """Return the description of a model; None if it cannot have inference weights."""
    try:
        return describe(lm)[0]
    except NotDescribed:
        return None


def plan_inference_weights(
    lm: PreTrainedModel,
    names: Iterable[str],
    *,
    world: World,
    dtype: torch.dtype,
    in_place: bool = False,
    quantization: Quantization | None = None,
) -> InferenceWeights | None:
    """Plan inference weights, as InferenceWeights; None, with a log line, if the family table does not cover the model.

    Raises:
        UserError: for such a model with tensor parallelism or quantization, which its Hugging Face module does not
            support.
    """
    try:
        model = DescribedModel.of(lm, names)
        return InferenceWeights(model, world=world, dtype=dtype, in_place=in_place, quantization=quantization)
    except NotDescribed as error:
        if quantization is not None:
            raise UserError(
                f"rollout.quantization {quantization} needs inference weights, {type(lm).__name__} has none ({error}): "
                "leave it out"
            ) from error
        if world.size > 1:
            raise UserError(
                f"tensor parallelism needs inference weights, {type(lm).__name__} has none ({error}): "
                "set tensor_parallel to 1"
            ) from error
        if world.is_main:
            logger.info("generation of %s runs through its Hugging Face module: %s", type(lm).__name__, error)
        return None


class SharedWeights:
    """Inference weights that share memory with a model where possible, and follow its training."""

    def __init__(
        self, lm: PreTrainedModel, weights: InferenceWeights, adapters: Mapping[str, Mapping[str, LowRank]]
    ) -> None:
        """Args: the model, which is weakly referenced, the plan of its inference weights, and adapters by name."""
        self._lm = weakref.ref(lm)
        self._weights = weights
        self._adapters = adapters
        self._version: list[tuple[int, int]] = []

    @classmethod
    def of(
        cls,
        lm: PreTrainedModel,
        *,
        world: World,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
        adapters: Mapping[str, Mapping[str, LowRank]] | None = None,
    ) -> SharedWeights | None:
        """Plan the inference weights of a model; None as in `plan_inference_weights`.

        Args:
            lm: model with its full weights.
            world: the tensor-parallel ranks.
            dtype: dtype of the inference weights.
            quantization: quantization of the products of layers; none: they keep the dtype.
            adapters: adapters by name, numbered from 1; on a single rank only.

        Raises:
            UserError: as in `plan_inference_weights`; with adapters, also when the model has no inference weights.
        """
        names = [name for name, _ in lm.named_parameters()]
        # in place: after training, copies are rewritten at the addresses that CUDA graphs contain
        weights = plan_inference_weights(lm, names, world=world, dtype=dtype, in_place=True, quantization=quantization)
        if weights is None and adapters:
            raise UserError(f"adapters need inference weights, {type(lm).__name__} has none: serve merged models")
        return None if weights is None else cls(lm, weights, adapters or {})

    def newer(self) -> Decoder | None:
        """Return the decoder of the current weights; None if they have not changed since the last call.

        Weights have changed if the version or address of a parameter is new, as after an optimizer step or
        `load_state_dict`. In-place changes of `parameter.data` are not detected.

        Raises:
            UserError: when a product does not support its adapters.
        """
        lm = self._lm()
        parameters = {} if lm is None else dict(lm.named_parameters())
        version = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters.values()]
        if not version or version == self._version:
            return None
        self._version = version
        decoder = self._weights.build((name, tensor, True) for name, tensor in parameters.items())
        if self._adapters and not decoder.has_adapters:
            decoder.add_adapters(adapter_changes(self._adapters, parameters, self._weights.targets))
        return decoder


def decoder_of(
    lm: PreTrainedModel, *, world: World, dtype: torch.dtype, quantization: Quantization | None = None
) -> Decoder | None:
    """Build the decoder of a model with full weights; None if it has no inference weights. See `SharedWeights.of`."""
    shared = SharedWeights.of(lm, world=world, dtype=dtype, quantization=quantization)
    return None if shared is None else shared.newer()
