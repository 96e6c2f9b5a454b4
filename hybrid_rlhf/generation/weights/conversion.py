"""From a Hugging Face model to inference weights, with a check that the two compute the same.

Why a check at start-up: inference weights that are wrong for a model would let it train on samples of another. One
short prompt is enough; a difference above the tolerance stops the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.logprobs import token_logprobs
from hybrid_rlhf.generation.batching.cache import CacheLayout, KVCache
from hybrid_rlhf.generation.model.attention import Attention, Chunks, DecodeRows
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.model.quantised import Quantization
from hybrid_rlhf.generation.sampler import gather_vocabulary
from hybrid_rlhf.generation.weights.describe import NotDescribed, describe
from hybrid_rlhf.generation.weights.loader import WeightLoader
from hybrid_rlhf.models.families import has_float32_logits
from hybrid_rlhf.models.head_check import LogitAgreement, agreement, probe_tokens
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World

logger = logging.getLogger(LOGGER_NAME)
LOW_PRECISION_TOLERANCE = 0.1
"""Mean difference in nats allowed for the probe's log-probs in bfloat16 and float16; more where logits are large."""
QUANTISED_TOLERANCE = 0.5
"""The same with quantised products. SmolLM2-135M in int8 differs by 0.37 on the probe and by 0.2 on its own samples."""


class InferenceWeights:
    """A model's inference weights on this rank: planned once, built whenever the training weights have changed."""

    def __init__(
        self,
        lm: PreTrainedModel,
        names: Iterable[str],
        *,
        world: World,
        dtype: torch.dtype,
        in_place: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        """Plan.

        Args:
            lm: the model; its weights may be partitioned.
            names: of its weights, tied ones once.
            world: the tensor-parallel ranks.
            dtype: of the inference weights.
            in_place: later builds write into the weights of the first, unless these are packed or quantised.
            quantization: of the products of the layers; none: they keep the dtype.

        Raises:
            NotDescribed: when the family table does not cover the model.
            UserError: when its heads cannot be split over the ranks, or its products not be quantised.
        """
        self._world = world
        self._loader = WeightLoader(
            *describe(lm),
            names,
            world=world,
            dtype=dtype,
            in_place=in_place,
            float32_logits=has_float32_logits(lm),
            quantization=quantization,
        )
        self._decoder: Decoder | None = None

    def build(self, weights: Iterable[tuple[str, Tensor, bool]]) -> Decoder:
        """Build or update the decoder.

        Args:
            weights: name, full tensor, and whether the tensor's memory outlives this call unchanged, one by one.
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
        return InferenceWeights(lm, names, world=world, dtype=dtype, in_place=in_place, quantization=quantization)
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


def decoder_of(
    lm: PreTrainedModel, *, world: World, dtype: torch.dtype, quantization: Quantization | None = None
) -> Decoder | None:
    """The decoder of a model with full weights, which it shares where it can; none as in `plan_inference_weights`."""
    parameters = dict(lm.named_parameters())
    weights = plan_inference_weights(lm, parameters, world=world, dtype=dtype, quantization=quantization)
    return None if weights is None else weights.build((name, tensor, True) for name, tensor in parameters.items())


def probe_logprobs(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Log-probs [P - 1] float32 of all tokens except the first."""
    logits = probe_logits(decoder, tokens)
    return token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device))


@torch.inference_mode()
def probe_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits [P - 1, V] float32 after all tokens except the last: one half by prefill, the other token by token."""
    a, device = decoder.architecture, decoder.world.device
    (attention, pages), states = _probe_attention(decoder, len(tokens)), decoder.new_states(1)
    ids = torch.tensor(tokens, device=device)
    half = len(tokens) // 2
    places = torch.arange(len(tokens), device=device)
    slots = places[:1]

    def computed(part: slice, rows: DecodeRows | None, chunks: Chunks | None = None) -> Tensor:
        recur = None if states is None else states.step(rows, chunks)
        return decoder.hidden(ids[part], places[part], attention.step(rows, chunks), states=recur)

    hidden = [computed(slice(half), None, Chunks(pages, [0], [half], slots))]
    for place in range(half, len(tokens) - 1):
        one = slice(place, place + 1)
        hidden.append(computed(one, DecodeRows(pages, places[one], place + 1, slots)))
    return gather_vocabulary(decoder.logits(torch.cat(hidden)), a.vocab_size, decoder.world)


@torch.inference_mode()
def probe_hidden(decoder: Decoder, tokens: Sequence[int]) -> list[Tensor]:
    """Hidden states [P, H] before the first layer and after each, by one prefill."""
    device, observed = decoder.world.device, list[Tensor]()
    (attention, pages), states = _probe_attention(decoder, len(tokens)), decoder.new_states(1)
    places = torch.arange(len(tokens), device=device)
    chunks = Chunks(pages, [0], [len(tokens)], places[:1])
    recur = None if states is None else states.step(None, chunks)
    ids = torch.tensor(tokens, device=device)
    decoder.hidden(ids, places, attention.step(None, chunks), states=recur, observe=observed.append)
    return observed


def _probe_attention(decoder: Decoder, tokens: int) -> tuple[Attention, Tensor]:
    """Attention over a cache for one sequence, and its pages."""
    a, device = decoder.architecture, decoder.world.device
    layout = CacheLayout.of(a, tokens)
    cache = KVCache(
        layout,
        pages=layout.pages_of(tokens, computed_together=tokens),
        kv_heads=len(decoder.split.kv_heads),
        head_dim=a.head_dim,
        dtype=decoder.dtype,
        device=device,
    )
    pages = torch.arange(cache.pages, dtype=torch.int32, device=device).view(layout.tables, 1, -1)
    return Attention(a, decoder.split, cache, capacity_tokens=tokens, kernels=decoder.kernels), pages


def agreement_with(decoder: Decoder, expected: Tensor) -> LogitAgreement:
    """Compare a decoder with log-probs [P - 1] under the training forward, of all `probe_tokens` except the first."""
    tokens = probe_tokens(decoder.architecture.vocab_size)
    logits = probe_logits(decoder, tokens)
    return agreement(
        token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device)),
        expected,
        # int8 rounds by 1/127 of the largest value, bfloat16 by 1/128
        torch.bfloat16 if decoder.quantisation_errors else decoder.dtype,
        low_precision=QUANTISED_TOLERANCE if decoder.quantisation_errors else LOW_PRECISION_TOLERANCE,
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
