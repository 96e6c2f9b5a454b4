"""From a Hugging Face model to the inference layout, and the proof that the two compute the same.

Why a proof at start-up: a layout that is wrong for one model would train on samples of another. One prompt costs a
moment; a difference past the tolerance stops the run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

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
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World

logger = logging.getLogger(LOGGER_NAME)
PROBE_TOKENS = 24
FLOAT32_TOLERANCE = 2e-3
"""Nats that the worst of the probe's log-probs may be off."""
LOW_PRECISION_TOLERANCE = 0.1
"""Nats that they may be off on average, in bfloat16 and float16."""


def decoder_of(lm: PreTrainedModel, *, world: World, dtype: torch.dtype) -> Decoder:
    """The decoder of a model whose weights are whole; a view of them where it can be.

    Raises:
        NotDescribed: when the family table does not cover the model.
        UserError: when its heads cannot be shared out over the ranks.
    """
    architecture, names = describe(lm)
    weights = dict(lm.named_parameters())
    loader = WeightLoader(architecture, names, weights, world=world, dtype=dtype)
    for name, parameter in weights.items():
        loader.load(name, parameter, lasting=True)
    return Decoder(architecture, loader.assemble(), loader.split, world)


def report_undescribed(lm: PreTrainedModel, error: NotDescribed, world: World) -> None:
    """Say that generation runs through the module, and why.

    Raises:
        UserError: under tensor parallelism, which the module does not know.
    """
    if world.size > 1:
        raise UserError(
            f"tensor parallelism needs the inference layout, {type(lm).__name__} has none ({error}): "
            "set tensor_parallel to 1"
        )
    if world.is_main:
        logger.info("generation of %s runs through its Hugging Face module: %s", type(lm).__name__, error)


def probe_tokens(vocab_size: int) -> list[int]:
    """The prompt that layouts are checked with."""
    return torch.randint(vocab_size, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()


@torch.inference_mode()
def probe_logprobs(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Log-probs [P - 1] float32 of all tokens but the first: half of them read at once, the others one by one."""
    a, device, world = decoder.architecture, decoder.world.device, decoder.world
    cache = KVCache(a, decoder.split, slots=1, capacity_tokens=len(tokens), dtype=decoder.dtype, device=device)
    attention = Attention(a, decoder.split, cache)
    ids = torch.tensor(tokens, device=device)
    half = len(tokens) // 2
    places = torch.arange(len(tokens), device=device)
    hidden = [decoder.hidden(ids[:half], places[:half], attention.prefill([Span([0], 0, half)]))]
    for place in range(half, len(tokens) - 1):
        one = slice(place, place + 1)
        attend = attention.decode(places[one], shortest=place + 1, longest=place + 1)
        hidden.append(decoder.hidden(ids[one], places[one], attend))
    logits = gather_vocabulary(decoder.logits(torch.cat(hidden)), a.vocab_size, world)
    return token_logprobs(logits, labels=ids[1:])


def check_layout(decoder: Decoder, expected: Tensor) -> None:
    """Compare with the training forward on the probe.

    Args:
        decoder: to check.
        expected: [P - 1] log-probs of `probe_tokens` under the training forward, all but the first.

    Raises:
        UserError: when they differ past the tolerance.
    """
    found = probe_logprobs(decoder, probe_tokens(decoder.architecture.vocab_size))
    difference = (found - expected.to(found)).abs()
    exact = decoder.dtype == torch.float32
    measured = float(difference.max() if exact else difference.mean())
    tolerance = FLOAT32_TOLERANCE if exact else LOW_PRECISION_TOLERANCE
    if not measured <= tolerance:  # NaN is past it
        raise UserError(
            f"the inference layout must agree with the training forward to {tolerance} nats, "
            f"it is {measured:.3g} off: set rollout.layout to module, and report the model"
        )
