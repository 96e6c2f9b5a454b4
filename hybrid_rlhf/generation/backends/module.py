"""Generation through the Hugging Face module and its own cache, for models without inference weights.

Prompts are left-padded, and position ids count real tokens. A prompt with `n` samples is computed once. Finished rows
leave the batch when half of it has finished, unless a layer keeps a recurrent state, which has no rows to select.

Shapes: P prompts, B live rows, T tokens so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hybrid_rlhf.generation.batching.decode_batch import DecodeBatch, SamplingMode
from hybrid_rlhf.generation.batching.requests import NewTokens, Request
from hybrid_rlhf.generation.sampler import Sampler
from hybrid_rlhf.models.policy import wide_logits
from hybrid_rlhf.models.pretrained.loading import position_limit
from hybrid_rlhf.runtime.world import solo_world

_DEFAULT_ROWS = 256
"""Most completions to decode together by default: the module's cache is not planned."""


class ModuleBackend:
    """Decodes with the weights of a Hugging Face model, as they are and where they are."""

    def __init__(self, lm: PreTrainedModel, *, max_batch_rows: int | None = None) -> None:
        """Args: a model with full weights on one device, and the most completions to decode together (none: 256)."""
        self._lm: PreTrainedModel | None = lm
        self._max_rows = max_batch_rows or _DEFAULT_ROWS
        self.max_positions = position_limit(lm)
        self.decode_bytes = 0

    def run(self, requests: Sequence[Request]) -> Iterator[NewTokens]:
        """See GenerationBackend."""
        if self._lm is None:
            raise RuntimeError("a backend must be open to generate, this one was closed")
        for batch in _batches(self._lm, requests, max_rows=self._max_rows):
            yield from _ModuleBatch(self._lm, batch).steps()

    def close(self) -> None:
        """See GenerationBackend."""
        self._lm = None


class _ModuleBatch:
    """A batch of prompts with the same number of samples."""

    def __init__(self, lm: PreTrainedModel, requests: Sequence[Request]) -> None:
        """Take requests, ordered by prompt, with the same number of samples for each prompt."""
        self._lm = lm
        self._device = next(lm.parameters()).device
        self._samples = requests[0].params.n
        self._prompts = [request.prompt for request in requests[:: self._samples]]
        self._live = list(requests)
        vocab_size = lm.config.get_text_config().vocab_size
        self._sampler = Sampler(vocab_size, SamplingMode.of(requests), solo_world(self._device))
        self._rows = DecodeBatch.of(requests, vocab_size=vocab_size, device=self._device)
        accepted = inspect.signature(lm.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"  # Mamba's name for it

    @torch.no_grad()
    def steps(self) -> Iterator[NewTokens]:
        """Decode to the end; yields the new tokens of each step."""
        mask, cache, logits = self._prefill()
        while True:
            drawn = self._sampler(logits.float(), self._rows)
            yield self._append(drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.sampling_logprobs.tolist())
            live = [slot for slot, request in enumerate(self._live) if request.finish_reason is None]
            if not live:
                return
            tokens = drawn.tokens
            if 2 * len(live) <= len(self._live) and _has_rows(cache):
                kept = torch.tensor(live, device=self._device)
                cache.batch_select_indices(kept)
                mask, tokens = mask[kept], tokens[kept]
                self._live, self._rows = [self._live[slot] for slot in live], self._rows.select(kept)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = self._forward(tokens[:, None], mask, cache)

    def _prefill(self) -> tuple[Tensor, DynamicCache, Tensor]:
        cache, n = DynamicCache(config=self._lm.config), self._samples
        prompts = self._prompts if _has_rows(cache) else [request.prompt for request in self._live]
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        logits = self._forward(ids, mask, cache)
        if n > 1 and _has_rows(cache):
            cache.batch_repeat_interleave(n)
            mask, logits = mask.repeat_interleave(n, dim=0), logits.repeat_interleave(n, dim=0)
        return mask, cache, logits

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Next-token logits [B, V]."""
        extra: dict[str, object] = {self._cache_name: cache}
        if not _is_recurrent(self._lm):  # not padded, and would apply the mask of all tokens to the new one
            extra["attention_mask"] = mask
        if self._takes_positions:
            extra["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if self._takes_logits_to_keep:
            extra["logits_to_keep"] = 1
        with wide_logits(self._lm):
            output = self._lm(input_ids=ids, use_cache=True, **extra)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _append(self, tokens: list[int], logprobs: list[float], sampling_logprobs: list[float]) -> NewTokens:
        new: NewTokens = []
        for request, token, *both in zip(self._live, tokens, logprobs, sampling_logprobs, strict=True):
            if request.finish_reason is None:
                request.append(token, *both)
                new.append((request, token))
        return new


def _batches(lm: PreTrainedModel, requests: Sequence[Request], *, max_rows: int) -> Iterator[list[Request]]:
    """Requests that decode together: the same number of samples, similar prompt lengths, at most `max_rows` rows."""
    groups: dict[int, list[list[Request]]] = {}
    for request in requests:
        prompts = groups.setdefault(request.params.n, [])
        if not prompts or prompts[-1][0].prompt_index != request.prompt_index:
            prompts.append([])
        prompts[-1].append(request)
    for n, prompts in groups.items():
        prompts.sort(key=_prompt_tokens)
        size = max(1, max_rows // n)
        groups_of_prompts = (
            [prompts]
            if not _is_recurrent(lm)
            else [list(same_length) for _, same_length in groupby(prompts, _prompt_tokens)]
        )
        for together in groups_of_prompts:
            for start in range(0, len(together), size):
                yield [request for samples in together[start : start + size] for request in samples]


def _prompt_tokens(samples: Sequence[Request]) -> int:
    return len(samples[0].prompt)


def _is_recurrent(lm: PreTrainedModel) -> bool:
    """Whether a model has layers with a recurrent state, which padding would change."""
    return bool(getattr(lm, "_is_stateful", False))


def _has_rows(cache: DynamicCache) -> bool:
    """Whether rows can be selected in every layer of a cache."""
    return bool(cache.layers) and all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
