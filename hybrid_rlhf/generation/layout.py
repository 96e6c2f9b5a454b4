"""From a Hugging Face model to the inference layout, and the proof that the two compute the same.

Why a proof at start-up: a layout that is wrong for one model would train on samples of another. One prompt costs a
moment; a difference past the tolerance stops the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.logprobs import token_logprobs
from hybrid_rlhf.generation.attention import Attention, Span
from hybrid_rlhf.generation.cache import KVCache
from hybrid_rlhf.generation.decoder import Decoder
from hybrid_rlhf.generation.families import NotDescribed, describe
from hybrid_rlhf.generation.sampler import gather_vocabulary
from hybrid_rlhf.generation.weights import WeightLoader
from hybrid_rlhf.models.head_check import agreement, probe_tokens
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World

logger = logging.getLogger(LOGGER_NAME)
LOW_PRECISION_TOLERANCE = 0.1
"""Nats that the probe's log-probs may be off on average, in bfloat16 and float16; more where logits are large."""


class InferenceLayout:
    """A model's inference layout on this rank: planned once, built as often as the weights change."""

    def __init__(
        self, lm: PreTrainedModel, names: Iterable[str], *, world: World, dtype: torch.dtype, in_place: bool = False
    ) -> None:
        """Plan.

        Args:
            lm: the model; its weights may be partitioned.
            names: of its weights, tied ones once.
            world: the tensor-parallel ranks.
            dtype: of the layout.
            in_place: later builds write into the weights of the first, where they are not packed.

        Raises:
            NotDescribed: when the family table does not cover the model.
            UserError: when its heads cannot be shared out over the ranks.
        """
        self._world = world
        self._loader = WeightLoader(*describe(lm), names, world=world, dtype=dtype, in_place=in_place)
        self._decoder: Decoder | None = None

    def build(self, weights: Iterable[tuple[str, Tensor, bool]]) -> Decoder:
        """The decoder of weights that come by one by one, each with its name, whole, and whether it is lasting."""
        for name, tensor, lasting in weights:
            self._loader.load(name, tensor, lasting=lasting)
        if self._decoder is not None:
            self._decoder.refresh()
            return self._decoder
        decoder = Decoder(self._loader.architecture, self._loader.assemble(), self._loader.split, self._world)
        if self._loader.in_place:
            self._decoder = decoder
        return decoder


def plan_layout(
    lm: PreTrainedModel, names: Iterable[str], *, world: World, dtype: torch.dtype, in_place: bool = False
) -> InferenceLayout | None:
    """See InferenceLayout; none, and a line in the log, for a model that generates through its module.

    Raises:
        UserError: for such a model under tensor parallelism, which the module does not know.
    """
    try:
        return InferenceLayout(lm, names, world=world, dtype=dtype, in_place=in_place)
    except NotDescribed as error:
        if world.size > 1:
            raise UserError(
                f"tensor parallelism needs the inference layout, {type(lm).__name__} has none ({error}): "
                "set tensor_parallel to 1"
            ) from error
        if world.is_main:
            logger.info("generation of %s runs through its Hugging Face module: %s", type(lm).__name__, error)
        return None


def decoder_of(lm: PreTrainedModel, *, world: World, dtype: torch.dtype) -> Decoder | None:
    """The decoder of a model whose weights are whole, a view of them where it can be; none as in `plan_layout`."""
    weights = dict(lm.named_parameters())
    layout = plan_layout(lm, weights, world=world, dtype=dtype)
    return None if layout is None else layout.build((name, weight, True) for name, weight in weights.items())


def probe_logprobs(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Log-probs [P - 1] float32 of all tokens but the first."""
    logits = probe_logits(decoder, tokens)
    return token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device))


@torch.inference_mode()
def probe_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits [P - 1, V] float32 after all tokens but the last: half of them read at once, the others one by one."""
    a, device, world = decoder.architecture, decoder.world.device, decoder.world
    cache = KVCache(a, decoder.split, slots=1, capacity_tokens=len(tokens), dtype=decoder.dtype, device=device)
    attention = Attention(a, decoder.split, cache, decoder.kernels)
    ids = torch.tensor(tokens, device=device)
    half = len(tokens) // 2
    places = torch.arange(len(tokens), device=device)
    hidden = [decoder.hidden(ids[:half], places[:half], attention.prefill([Span([0], 0, half)]))]
    for place in range(half, len(tokens) - 1):
        one = slice(place, place + 1)
        attend = attention.decode(places[one], shortest=place + 1, longest=place + 1)
        hidden.append(decoder.hidden(ids[one], places[one], attend))
    return gather_vocabulary(decoder.logits(torch.cat(hidden)), a.vocab_size, world)


def check_layout(decoder: Decoder, expected: Tensor) -> None:
    """Compare with the training forward on the probe.

    Args:
        decoder: to check.
        expected: [P - 1] log-probs of `probe_tokens` under the training forward, all but the first.

    Raises:
        UserError: when they differ past the tolerance.
    """
    tokens = probe_tokens(decoder.architecture.vocab_size)
    logits = probe_logits(decoder, tokens)
    told = agreement(
        token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device)), expected, decoder.dtype,
        low_precision=LOW_PRECISION_TOLERANCE, magnitude=float(logits.abs().amax(dim=-1).mean()),
    )  # fmt: skip
    if not told.holds:
        raise UserError(
            f"the inference layout must agree with the training forward to {told.tolerance:.3g} nats, "
            f"it is {told.measured:.3g} off: set layout to module (rollout.layout in a config), and report the model"
        )
