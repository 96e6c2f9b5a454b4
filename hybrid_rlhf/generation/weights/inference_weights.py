"""From a Hugging Face model to inference weights: planned once, built whenever the training weights have changed."""

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
    """All that inference weights are planned from; another rank can do it without the model."""

    architecture: ModelDescription
    names: Mapping[str, str]
    """The family's names for its modules."""
    parameters: tuple[str, ...]
    """Names of the weights, tied ones once."""
    unread: tuple[str, ...]
    """Those that have no part in reading text: of towers for images and sound."""
    float32_logits: bool

    @classmethod
    def of(cls, lm: PreTrainedModel, parameters: Iterable[str]) -> DescribedModel:
        """A model whose weights have these names; they may be partitioned.

        Raises:
            NotDescribed: when the family table does not cover the model.
        """
        named = tuple(parameters)
        return cls(*describe(lm), named, unread_weights(lm, named), has_float32_logits(lm))


DescribeModel = Callable[[PreTrainedModel, Iterable[str]], DescribedModel]
"""See DescribedModel.of."""


class InferenceWeights:
    """A model's inference weights on this rank: planned once, built whenever the training weights have changed."""

    def __init__(
        self,
        model: DescribedModel,
        *,
        world: World,
        dtype: torch.dtype,
        in_place: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        """Plan.

        Args:
            model: the model.
            world: the tensor-parallel ranks.
            dtype: of the inference weights.
            in_place: later builds write into the weights of the first, unless these are packed or quantised.
            quantization: of the products of the layers; none: they keep the dtype.

        Raises:
            NotDescribed: when the decoder has no use for one of its weights.
            UserError: when its heads cannot be split over the ranks, or its products not be quantised.
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
        """Of the model."""
        return self._loader.architecture

    @property
    def in_place(self) -> bool:
        """Whether later builds write into the weights of the first."""
        return self._loader.in_place

    @property
    def targets(self) -> Mapping[str, Sequence[tuple[str, int, Pick]]]:
        """Which parts of inference weights each weight becomes, and how."""
        return self._loader.targets

    def picks(self, name: str) -> list[Pick]:
        """What this rank takes of a weight: functions of the full weight."""
        return [pick for _, _, pick in self._loader.targets[name]]

    def build(self, weights: Iterable[tuple[str, Tensor, bool]]) -> Decoder:
        """Build or update the decoder.

        Args:
            weights: name, full tensor, and whether the tensor's memory outlives this call unchanged, one by one; an
                update in place needs those that have changed.
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
    """The architecture of a model that can have inference weights; none for others."""
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
    """See InferenceWeights; none, and a line in the log, for a model that the family table does not describe.

    Raises:
        UserError: for such a model under tensor parallelism or quantised, which its Hugging Face module does not
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
    """Inference weights that share the full weights of a model where they can, and follow its training."""

    def __init__(
        self, lm: PreTrainedModel, weights: InferenceWeights, adapters: Mapping[str, Mapping[str, LowRank]]
    ) -> None:
        """Take a model, which may be deleted later, the plan of its inference weights, and adapters by name."""
        self._lm, self._weights, self._adapters = weakref.ref(lm), weights, adapters
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
        """Those of a model; none as in `plan_inference_weights`.

        Args:
            lm: has its full weights.
            world: see `plan_inference_weights`.
            dtype: see there.
            quantization: see there.
            adapters: which tokens choose by their numbers, from 1 on; on a single rank.

        Raises:
            UserError: as `plan_inference_weights`; with adapters, when the model has no inference weights.
        """
        names = [name for name, _ in lm.named_parameters()]
        # in place: what is a copy is written again after training, at the addresses that CUDA graphs hold
        weights = plan_inference_weights(lm, names, world=world, dtype=dtype, in_place=True, quantization=quantization)
        if weights is None and adapters:
            raise UserError(f"adapters need inference weights, {type(lm).__name__} has none: serve merged models")
        return None if weights is None else cls(lm, weights, adapters or {})

    def newer(self) -> Decoder | None:
        """The decoder of the present weights; none if they have not changed since the last call.

        A change is a new version or address of a parameter, as optimizers and `load_state_dict` leave it. In-place
        changes of `parameter.data` are not seen.

        Raises:
            UserError: when a product does not take its adapters.
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
    """The decoder of a model with full weights; see SharedWeights.of."""
    shared = SharedWeights.of(lm, world=world, dtype=dtype, quantization=quantization)
    return None if shared is None else shared.newer()
