"""Log-probs of prompts and values of scorers (models/policy.py), computed with inference weights.

Whole sequences pass through the decoder without padding. Nothing is cached: layers overwrite each other's keys and
values in the same pages.

Shapes: B batch, T time, N real tokens of a batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.functional.logprobs import LEAST_CHUNK_TOKENS
from hybrid_rlhf.functional.masking import position_ids
from hybrid_rlhf.functional.transfers import moved
from hybrid_rlhf.generation.architecture.hugging_face import SCORE_HEAD
from hybrid_rlhf.generation.model.attention import Attention, Chunks
from hybrid_rlhf.generation.model.cache import CacheLayout, blocks_of
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.model.images import image_tokens, rotated_positions, two_way_spans
from hybrid_rlhf.generation.ops.sampling import gather_vocabulary
from hybrid_rlhf.generation.sampling import PromptLogprobs
from hybrid_rlhf.generation.weights.inference_weights import DescribedModel
from hybrid_rlhf.models.policy import scatter_tokens
from hybrid_rlhf.models.vision import EncodedImages


class InferenceScorer:
    """A Scorer with inference weights. The ranks of the decoder call it with the same rows."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @torch.no_grad()
    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, images: Sequence[EncodedImages | None] = ()
    ) -> Tensor:
        """Return the output of the head [B, T] after each real token, as Scorer. `images`: of each row, with places
        among its real tokens; empty: there are none."""
        real = attention_mask.bool().cpu()
        hidden = whole_hidden(self._decoder, input_ids.cpu(), real, images=images)
        cells = moved(real.flatten().nonzero().squeeze(1), hidden.device)
        return scatter_tokens(self._decoder.logits(hidden).squeeze(-1), cells, (len(real), real.shape[1]))


@torch.no_grad()
def prompt_logprobs(
    decoder: Decoder, tokens: Sequence[int], adapter: int, top: int, images: EncodedImages | None = None
) -> PromptLogprobs:
    """Return the log-probs of a prompt's tokens but the first, with the `top` most likely tokens."""
    ids = torch.tensor([tokens])
    states = whole_hidden(decoder, ids, torch.ones_like(ids, dtype=torch.bool), adapter, [images])[:-1]
    labels = ids[0, 1:].to(states.device)
    logprobs = list[float]()
    tops = list[list[tuple[int, float]]]()
    for start in range(0, len(tokens) - 1, LEAST_CHUNK_TOKENS):
        part = slice(start, start + LEAST_CHUNK_TOKENS)
        logits = gather_vocabulary(decoder.logits(states[part]), decoder.architecture.vocab_size, decoder.world)
        found = PromptLogprobs.of(logits, labels[part], top)
        logprobs += found.logprobs
        tops += found.top
    return PromptLogprobs(logprobs, tops)


def whole_hidden(
    decoder: Decoder,
    input_ids: Tensor,
    real: Tensor,
    adapter: int = 0,
    images: Sequence[EncodedImages | None] = (),
) -> Tensor:
    """Return the last hidden states [N, H] of the real tokens of [B, T], which are on the host, row by row, before the
    final norm. `images` are as in `InferenceScorer`."""
    device = decoder.world.device
    layout = CacheLayout.of_one_pass(decoder.architecture, decoder.split)
    counts = real.sum(dim=1).tolist()
    parts = [(image, 0, n) for image, n in zip(images or [None] * len(counts), counts, strict=True) if n]
    lengths = [length for _, _, length in parts]
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
    slots = torch.arange(len(lengths), device=device)
    tokens, positions = moved((input_ids[real], position_ids(real)[real]), device)
    return decoder.hidden(
        tokens,
        positions,
        attention,
        states=decoder.new_states(len(lengths)),
        chunks=Chunks(pages.to(device), [0] * len(lengths), lengths, slots, two_way_spans(parts)),
        adapters=torch.full_like(tokens, adapter) if adapter else None,
        rotated=rotated_positions(parts, device) if decoder.architecture.has_axes else None,
        images=image_tokens(parts, device),
    )


def described_scorer(lm: PreTrainedModel, parameters: Iterable[str]) -> DescribedModel:
    """Describe a classifier: its head computes in the dtype of the weights, without logit scale and soft cap."""
    described = DescribedModel.of(lm, parameters)
    plain = replace(described.architecture, logit_scale=1.0, final_softcap=None, banned_ids=())
    return replace(
        described, architecture=plain, names={**described.names, SCORE_HEAD: SCORE_HEAD}, float32_logits=False
    )
