"""From a Hugging Face model to inference weights, with a check that the two compute the same.

Why a check at start-up: inference weights that are wrong for a model would let it train on samples of another. One
short prompt is enough; a difference above the tolerance stops the run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.logprobs import token_logprobs
from hybrid_rlhf.generation.batching.cache import CacheLayout
from hybrid_rlhf.generation.model.attention import Attention, Chunks, DecodeRows
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.model.quantised import Quantization
from hybrid_rlhf.generation.sampler import gather_vocabulary
from hybrid_rlhf.generation.weights.adapters import adapter_changes
from hybrid_rlhf.generation.weights.describe import NotDescribed, describe
from hybrid_rlhf.generation.weights.description import ModelDescription
from hybrid_rlhf.generation.weights.loader import WeightLoader
from hybrid_rlhf.generation.weights.picks import Pick
from hybrid_rlhf.models.families import has_float32_logits, unread_weights
from hybrid_rlhf.models.head_check import LogitAgreement, agreement, probe_tokens
from hybrid_rlhf.models.pretrained.adapters import LowRank
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World

logger = logging.getLogger(LOGGER_NAME)
LOW_PRECISION_TOLERANCE = 0.1
"""Mean difference in nats allowed for the probe's log-probs in bfloat16 and float16; more where logits are large."""
QUANTISED_TOLERANCE = 1.0
"""The same with quantised products. SmolLM2-135M in int8 differs by 0.37 on the probe, after some training by 0.5."""
PROBE_DECODED = 2
"""Tokens of the probe that pass one by one: each reads all weights, as the rest does at once."""


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


def probe_logprobs(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Log-probs [P - 1] float32 of all tokens except the first."""
    logits = probe_logits(decoder, tokens)
    return token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device))


@torch.inference_mode()
def probe_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits [P - 1, V] float32 after all tokens except the last: the first by prefill, the others token by token."""
    hidden = torch.cat(_probe_steps(_Probe(decoder, tokens), len(tokens) - 1))
    return gather_vocabulary(decoder.logits(hidden), decoder.architecture.vocab_size, decoder.world)


@torch.inference_mode()
def probe_routes(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Experts [P - 1, E, k] int64 of the same tokens in each mixture."""
    probe = _Probe(decoder, tokens, records_routes=True)
    steps, mixtures = len(_probe_steps(probe, len(tokens) - 1)), len(decoder.architecture.expert_layers)
    found = [torch.stack(probe.routes[step * mixtures : (step + 1) * mixtures], dim=1) for step in range(steps)]
    return torch.cat(found).long()


def _probe_steps(probe: _Probe, tokens: int) -> list[Tensor]:
    """Hidden states of so many tokens: of a prefill, and of each that is decoded after it."""
    places = range(tokens - PROBE_DECODED, tokens)
    return [probe.prefill(places.start), *map(probe.decode, places)]


@torch.inference_mode()
def probe_hidden(decoder: Decoder, tokens: Sequence[int]) -> list[Tensor]:
    """Hidden states [P, H] before the first layer and after each, by one prefill."""
    observed: list[Tensor] = []
    _Probe(decoder, tokens).prefill(len(tokens), observe=observed.append)
    return observed


class _Probe:
    """One sequence, with a cache and states of its own."""

    def __init__(self, decoder: Decoder, tokens: Sequence[int], *, records_routes: bool = False) -> None:
        self.routes: list[Tensor] = []
        """Experts [T, k] of each mixture in each step, if they are recorded."""
        self._records_routes = records_routes
        device, layout = decoder.world.device, CacheLayout.of(decoder.architecture, decoder.split, len(tokens))
        cache = decoder.new_cache(layout, pages=layout.pages_of(len(tokens), computed_together=len(tokens)))
        self._pages = torch.arange(cache.pages, dtype=torch.int32, device=device).view(layout.tables, 1, -1)
        self._decoder, self._states = decoder, decoder.new_states(1)
        self._attention = Attention(
            decoder.architecture, decoder.split, cache, capacity_tokens=len(tokens), kernels=decoder.kernels
        )
        self._ids, self._places = torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device)

    def prefill(self, tokens: int, *, observe: Callable[[Tensor], None] | None = None) -> Tensor:
        """Hidden states [tokens, H] of the first tokens."""
        return self._hidden(slice(tokens), None, Chunks(self._pages, [0], [tokens], self._places[:1]), observe)

    def decode(self, place: int) -> Tensor:
        """Hidden states [1, H] of one more token."""
        one = slice(place, place + 1)
        return self._hidden(one, DecodeRows(self._pages, self._places[one], place + 1, self._places[:1]))

    def _hidden(
        self,
        part: slice,
        rows: DecodeRows | None,
        chunks: Chunks | None = None,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        states = None if self._states is None else self._states.step(rows, chunks)
        attend = self._attention.step(rows, chunks)
        routes = self.routes if self._records_routes else None
        places = self._places[part]
        return self._decoder.hidden(self._ids[part], places, attend, states=states, observe=observe, routes=routes)


def agreement_with(decoder: Decoder, expected: Tensor) -> LogitAgreement:
    """Compare a decoder with log-probs [P - 1] under the training forward, of all `probe_tokens` except the first."""
    tokens = probe_tokens(decoder.architecture.vocab_size)
    logits, quantised = probe_logits(decoder, tokens), bool(decoder.quantisation_errors)
    return agreement(
        token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device)),
        expected,
        # int8 rounds by 1/127 of the largest value, bfloat16 by 1/128
        torch.bfloat16 if quantised else decoder.dtype,
        low_precision=QUANTISED_TOLERANCE if quantised else LOW_PRECISION_TOLERANCE,
        magnitude=float(logits.abs().amax(dim=-1).mean()),
    )


def check_inference_weights(decoder: Decoder, expected: Tensor) -> None:
    """Compare a decoder with the training forward on `probe_tokens`.

    Args:
        decoder: to check.
        expected: [P - 1] log-probs under the training forward, of all tokens except the first.

    Raises:
        UserError: when they differ by more than the tolerance.
    """
    result = agreement_with(decoder, expected)
    if not result.holds:
        raise UserError(
            f"inference weights must agree with the training forward to {result.tolerance:.3g} nats, they differ by "
            f"{result.measured:.3g}: set rollout.backend to module (GenerationEngine: backend='module') and "
            "report the model"
        )
