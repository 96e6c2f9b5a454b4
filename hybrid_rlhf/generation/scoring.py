"""Frozen models as inference weights: what a Policy or a Scorer (models/policy.py) computes, on tensor-parallel ranks.

Why: a reward model or a reference of which each rank has 1 / T needs no ZeRO, which would gather all its weights for
every micro-batch. Whole sequences pass through the decoder without padding. Nothing is cached: layers write their keys
and values to the same pages, one after the other.

Shapes: B batch, T time, N real tokens of a batch, n tokens of a mask, H hidden, V rows of the vocabulary on this rank,
R tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.masking import position_ids
from hybrid_rlhf.generation.architecture.hugging_face import SCORE_HEAD, NotDescribed
from hybrid_rlhf.generation.model.attention import Attention, Chunks
from hybrid_rlhf.generation.model.cache import CacheLayout, blocks_of
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.weights.inference_weights import DescribedModel, InferenceWeights
from hybrid_rlhf.generation.weights.probe import LOW_PRECISION_TOLERANCE
from hybrid_rlhf.models.head_check import agreement, module_logprobs, probe_tokens
from hybrid_rlhf.models.policy import HEAD_CHUNK_TOKENS, Scorer, places_before, scatter_tokens
from hybrid_rlhf.runtime.world import World, shared_user_errors


class InferencePolicy:
    """A Policy in inference weights; the ranks of the decoder call with the same rows."""

    def __init__(self, decoder: Decoder, adapter: int = 0) -> None:
        """Args: the weights, and the number of the adapter that all tokens have; 0: none."""
        self._decoder, self._adapter = decoder, adapter

    @torch.no_grad()
    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, token_mask: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the tokens of a mask, see Policy."""
        real = attention_mask.bool()
        places, wanted = places_before(real, token_mask)
        states, labels = whole_hidden(self._decoder, input_ids, real, self._adapter)[places], input_ids[wanted]
        found = torch.zeros(2, len(labels), dtype=torch.float32, device=labels.device)
        for start in range(0, len(labels), HEAD_CHUNK_TOKENS):
            part = slice(start, start + HEAD_CHUNK_TOKENS)
            logits = self._decoder.logits(states[part]) / temperature
            found[:, part] = split_logprobs(logits, labels[part], self._decoder.split.vocabulary, self._decoder.world)
        logprobs, entropy = found
        return scatter_tokens(logprobs, wanted), scatter_tokens(entropy, wanted)


class InferenceScorer:
    """A Scorer in inference weights; the ranks of the decoder call with the same rows."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The head's output after each real token, see Scorer."""
        real = attention_mask.bool()
        return scatter_tokens(self._decoder.logits(whole_hidden(self._decoder, input_ids, real)).squeeze(-1), real)


def whole_hidden(decoder: Decoder, input_ids: Tensor, real: Tensor, adapter: int = 0) -> Tensor:
    """Last hidden states [N, H] of the real tokens of [B, T], row by row, before the final norm."""
    device, layout = input_ids.device, CacheLayout.of_one_pass(decoder.architecture, decoder.split)
    lengths = [length for length in real.sum(dim=1).tolist() if length]
    blocks = [blocks_of(length) for length in lengths]
    pages = torch.zeros(1, len(lengths), max(blocks), dtype=torch.int32)
    pages[0, torch.arange(max(blocks)) < torch.tensor(blocks)[:, None]] = torch.arange(sum(blocks), dtype=torch.int32)
    attention = Attention(
        decoder.architecture,
        decoder.split,
        decoder.new_cache(layout, pages=sum(blocks)),
        capacity_tokens=max(lengths),
        kernels=decoder.kernels,
    )
    states = decoder.new_states(len(lengths))
    slots = None if states is None else torch.arange(len(lengths), device=device)
    chunks = Chunks(pages.to(device), [0] * len(lengths), lengths, slots)
    tokens = input_ids[real]
    return decoder.hidden(
        tokens,
        position_ids(real)[real],
        attention.step(None, chunks),
        adapters=torch.full_like(tokens, adapter) if adapter else None,
        states=None if states is None else states.step(None, chunks),
    )


def split_logprobs(logits: Tensor, labels: Tensor, vocabulary: range, world: World) -> Tensor:
    """Log-probs and entropies [2, n] of labels [n] under logits [n, V] of which each rank has some columns.

    Ranks exchange three numbers per token: the mass of their columns, the mean logit under it, the logit of the label.

    Args:
        logits: of this rank, float32.
        labels: tokens of the whole vocabulary.
        vocabulary: columns of this rank.
        world: the ranks.
    """
    here = (labels >= vocabulary.start) & (labels < vocabulary.stop)
    chosen = logits.gather(1, torch.where(here, labels - vocabulary.start, 0)[:, None])[:, 0]
    mass = logits.logsumexp(dim=-1)
    mean = (logits.softmax(dim=-1) * logits.clamp(min=torch.finfo(logits.dtype).min)).sum(dim=-1)
    masses, means, labelled = world.all_gather(torch.stack([mass, mean, torch.where(here, chosen, 0.0)])).unbind(dim=1)
    whole = masses.logsumexp(dim=0)
    return torch.stack([labelled.sum(dim=0) - whole, whole - ((masses - whole).exp() * means).sum(dim=0)])


def inference_policy(lm: PreTrainedModel, *, world: World) -> InferencePolicy:
    """A causal LM, whose weights are on the host, as inference weights of its dtype; every rank calls.

    Raises:
        UserError: on every rank, when it has no inference weights, its heads cannot be split over the ranks, or the
            inference weights compute something else than the model.
    """
    found = InferencePolicy(_decoder(lm, DescribedModel.of, world))
    tokens = probe_tokens(lm.config.vocab_size)
    ids = torch.tensor([tokens], device=world.device)
    _check(lm, found(ids, ids >= 0, ids >= 0)[0][0, 1:], lambda: module_logprobs(lm, tokens), world)
    return found


def inference_scorer(lm: PreTrainedModel, *, world: World) -> InferenceScorer:
    """The same of a sequence classifier with a score per token."""
    found = InferenceScorer(_decoder(lm, described_scorer, world))
    ids = torch.tensor([probe_tokens(lm.config.vocab_size)])
    own = ids.to(world.device)
    _check(lm, found(own, own >= 0)[0], lambda: Scorer(lm)(ids.to(lm.device), ids >= 0)[0], world)
    return found


def described_scorer(lm: PreTrainedModel, parameters: Iterable[str]) -> DescribedModel:
    """A classifier: its head computes in the dtype of the weights, and nothing follows it."""
    found = DescribedModel.of(lm, parameters)
    plain = replace(found.architecture, logit_scale=1.0, final_softcap=None)
    return replace(found, architecture=plain, names={**found.names, SCORE_HEAD: SCORE_HEAD}, float32_logits=False)


def _decoder(
    lm: PreTrainedModel, described: Callable[[PreTrainedModel, Iterable[str]], DescribedModel], world: World
) -> Decoder:
    """This rank's part of a model, which shares no memory with it."""
    parameters = dict(lm.named_parameters())
    with shared_user_errors(world):
        try:
            weights = InferenceWeights(described(lm, parameters), world=world, dtype=lm.dtype)
        except NotDescribed as error:
            raise UserError(
                f"tensor parallelism needs inference weights, models of type {lm.config.model_type} have none "
                f"({error}): leave tensor_parallel out"
            ) from error
    return weights.build((name, weight, False) for name, weight in parameters.items())


@torch.no_grad()
def _check(lm: PreTrainedModel, found: Tensor, expected: Callable[[], Tensor], world: World) -> None:
    """Compare what inference weights compute of the probe with what the model computes on the first rank."""
    wanted = world.broadcast_object(expected().cpu() if world.is_main else torch.empty(0))
    magnitude = float(wanted.abs().mean())
    result = agreement(found, wanted, lm.dtype, low_precision=LOW_PRECISION_TOLERANCE, magnitude=magnitude)
    if not result.holds:
        raise UserError(
            f"inference weights must agree with {type(lm).__name__} to {result.tolerance:.3g}, they differ by "
            f"{result.measured:.3g}: leave tensor_parallel out, and report the model"
        )
