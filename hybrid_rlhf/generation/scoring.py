"""Policies and scorers (models/policy.py) of frozen models, computed with inference weights on tensor-parallel ranks.

Why: a reward model or a reference that is divided over tensor-parallel ranks needs no ZeRO, which would gather all its
weights for every micro-batch. Whole sequences pass through the decoder without padding. Nothing is cached: layers
overwrite each other's keys and values in the same pages.

Shapes: B batch, T time, N real tokens of a batch, n tokens of a mask, H hidden, V rows of the vocabulary on this rank,
R tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.logprobs import agreement
from hybrid_rlhf.functional.masking import position_ids
from hybrid_rlhf.generation.architecture.hugging_face import SCORE_HEAD, NotDescribed
from hybrid_rlhf.generation.model.attention import Attention, Chunks
from hybrid_rlhf.generation.model.cache import CacheLayout, blocks_of
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops.sampling import gather_vocabulary
from hybrid_rlhf.generation.sampling import PromptLogprobs
from hybrid_rlhf.generation.weights.inference_weights import DescribedModel, InferenceWeights
from hybrid_rlhf.generation.weights.probe import LOW_PRECISION_TOLERANCE
from hybrid_rlhf.models.head_check import module_logprobs, probe_tokens
from hybrid_rlhf.models.policy import HEAD_CHUNK_TOKENS, Scorer, places_before, scatter_tokens
from hybrid_rlhf.runtime.world import World, shared_user_errors


class InferencePolicy:
    """A Policy with inference weights. The ranks of the decoder call it with the same rows."""

    def __init__(self, decoder: Decoder, adapter: int = 0) -> None:
        """Args: the decoder, and the number of the adapter for all tokens; 0: none."""
        self._decoder = decoder
        self._adapter = adapter

    @torch.no_grad()
    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, token_mask: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [B, T] of the tokens in `token_mask`, as Policy."""
        real = attention_mask.bool()
        places, wanted = places_before(real, token_mask)
        states = whole_hidden(self._decoder, input_ids, real, self._adapter)[places]
        labels = input_ids[wanted]
        results = torch.zeros(2, len(labels), dtype=torch.float32, device=labels.device)
        for start in range(0, len(labels), HEAD_CHUNK_TOKENS):
            part = slice(start, start + HEAD_CHUNK_TOKENS)
            logits = self._decoder.logits(states[part]) / temperature
            results[:, part] = split_logprobs(logits, labels[part], self._decoder.split.vocabulary, self._decoder.world)
        logprobs, entropy = results
        return scatter_tokens(logprobs, wanted), scatter_tokens(entropy, wanted)


class InferenceScorer:
    """A Scorer with inference weights. The ranks of the decoder call it with the same rows."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the output of the head [B, T] after each real token, as Scorer."""
        real = attention_mask.bool()
        return scatter_tokens(self._decoder.logits(whole_hidden(self._decoder, input_ids, real)).squeeze(-1), real)


@torch.no_grad()
def prompt_logprobs(decoder: Decoder, tokens: Sequence[int], adapter: int, top: int) -> PromptLogprobs:
    """Return the log-probs of a prompt's tokens but the first, with the `top` most likely tokens."""
    ids = torch.tensor([tokens], device=decoder.world.device)
    states = whole_hidden(decoder, ids, torch.ones_like(ids, dtype=torch.bool), adapter)[:-1]
    logprobs = list[float]()
    tops = list[list[tuple[int, float]]]()
    for start in range(0, len(tokens) - 1, HEAD_CHUNK_TOKENS):
        part = slice(start, start + HEAD_CHUNK_TOKENS)
        logits = gather_vocabulary(decoder.logits(states[part]), decoder.architecture.vocab_size, decoder.world)
        found = PromptLogprobs.of(logits, ids[0, 1:][part], top)
        logprobs += found.logprobs
        tops += found.top
    return PromptLogprobs(logprobs, tops)


def whole_hidden(decoder: Decoder, input_ids: Tensor, real: Tensor, adapter: int = 0) -> Tensor:
    """Return the last hidden states [N, H] of the real tokens of [B, T], row by row, before the final norm."""
    device = input_ids.device
    layout = CacheLayout.of_one_pass(decoder.architecture, decoder.split)
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
    """Return log-probs and entropies [2, n] for logits that are split over ranks by vocabulary.

    Ranks exchange three numbers per token: the log-sum-exp of their logits, the mean logit under their softmax, and the
    logit of the label.

    Args:
        logits: [n, V] float32, columns of this rank.
        labels: [n] token ids in the whole vocabulary.
        vocabulary: token ids of this rank's columns.
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
    """Build a policy with inference weights from a causal LM on the host, in its dtype. Every rank makes this call.

    Raises:
        UserError: on every rank, when the model has no inference weights, its heads cannot be split over the ranks, or
            the log-probs of the inference weights differ from the model's.
    """
    policy = InferencePolicy(_decoder(lm, DescribedModel.of, world))
    tokens = probe_tokens(lm.config.vocab_size)
    ids = torch.tensor([tokens], device=world.device)
    _check(lm, policy(ids, ids >= 0, ids >= 0)[0][0, 1:], lambda: module_logprobs(lm, tokens), world)
    return policy


def inference_scorer(lm: PreTrainedModel, *, world: World) -> InferenceScorer:
    """Build a scorer as `inference_policy`, from a sequence classifier with a score per token."""
    scorer = InferenceScorer(_decoder(lm, described_scorer, world))
    ids = torch.tensor([probe_tokens(lm.config.vocab_size)])
    local_ids = ids.to(world.device)
    _check(lm, scorer(local_ids, local_ids >= 0)[0], lambda: Scorer(lm)(ids.to(lm.device), ids >= 0)[0], world)
    return scorer


def described_scorer(lm: PreTrainedModel, parameters: Iterable[str]) -> DescribedModel:
    """Describe a classifier: its head computes in the dtype of the weights, without logit scale and soft cap."""
    described = DescribedModel.of(lm, parameters)
    plain = replace(described.architecture, logit_scale=1.0, final_softcap=None)
    return replace(
        described, architecture=plain, names={**described.names, SCORE_HEAD: SCORE_HEAD}, float32_logits=False
    )


def _decoder(
    lm: PreTrainedModel, described: Callable[[PreTrainedModel, Iterable[str]], DescribedModel], world: World
) -> Decoder:
    """Build this rank's part of a model. It shares no memory with the model."""
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
def _check(lm: PreTrainedModel, computed: Tensor, expected: Callable[[], Tensor], world: World) -> None:
    """Raise UserError if the probe's values computed by inference weights differ from the model's on the first rank."""
    wanted = world.broadcast_object(expected().cpu() if world.is_main else torch.empty(0))
    magnitude = float(wanted.abs().mean())
    result = agreement(
        computed, expected=wanted, dtype=lm.dtype, low_precision=LOW_PRECISION_TOLERANCE, magnitude=magnitude
    )
    if not result.holds:
        raise UserError(
            f"inference weights must agree with {type(lm).__name__} to {result.tolerance:.3g}, they differ by "
            f"{result.measured:.3g}: leave tensor_parallel out, and report the model"
        )
