"""Generation through the Hugging Face module and its own cache, for models that the inference layout does not describe.

Prompts are left-padded; position ids count real tokens. The prompt of `n` samples is read once, and rows that have
ended are taken out of the batch when half of it has, where a cache has rows: that of a recurrent layer has none.

Shapes: P prompts, B live rows, T tokens so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hybrid_rlhf.generation.requests import Request
from hybrid_rlhf.generation.rows import Mode, Rows
from hybrid_rlhf.generation.sampler import Sampler
from hybrid_rlhf.models.policy import wide_logits
from hybrid_rlhf.runtime.world import solo_world


class ModuleBatch:
    """Decodes prompts with equally many samples together."""

    def __init__(self, lm: PreTrainedModel, requests: Sequence[Request]) -> None:
        """Take requests; the samples of a prompt stand together, as many for each."""
        self._lm = lm
        self._device = next(lm.parameters()).device
        self._samples = requests[0].params.n
        self._prompts = [request.prompt for request in requests[:: self._samples]]
        self._live = list(requests)
        vocab_size = lm.config.get_text_config().vocab_size
        self._sampler = Sampler(vocab_size, Mode.of(requests), solo_world(self._device))
        self._rows = Rows.of(requests, vocab_size=vocab_size, device=self._device)
        accepted = inspect.signature(lm.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"  # Mamba's name for it

    @torch.no_grad()
    def steps(self) -> Iterator[list[tuple[Request, int]]]:
        """Run to the end; after each step, the tokens it added."""
        mask, cache, logits = self._prefill()
        while True:
            drawn = self._sampler(logits.float(), self._rows)
            yield self._take(drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.sampling_logprobs.tolist())
            going = [slot for slot, request in enumerate(self._live) if request.finish_reason is None]
            if not going:
                return
            tokens = drawn.tokens
            if 2 * len(going) <= len(self._live) and _has_rows(cache):
                kept = torch.tensor(going, device=self._device)
                cache.batch_select_indices(kept)
                mask, tokens = mask[kept], tokens[kept]
                self._live, self._rows = [self._live[slot] for slot in going], self._rows.select(kept)
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
        if not _is_recurrent(self._lm):  # one is not padded, and would take the mask of all tokens for this one's
            extra["attention_mask"] = mask
        if self._takes_positions:
            extra["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if self._takes_logits_to_keep:
            extra["logits_to_keep"] = 1
        with wide_logits(self._lm):
            output = self._lm(input_ids=ids, use_cache=True, **extra)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _take(
        self, tokens: list[int], logprobs: list[float], sampling_logprobs: list[float]
    ) -> list[tuple[Request, int]]:
        added = []
        for request, token, *both in zip(self._live, tokens, logprobs, sampling_logprobs, strict=True):
            if request.finish_reason is None:
                request.take(token, *both)
                added.append((request, token))
        return added


def module_batches(lm: PreTrainedModel, requests: Sequence[Request], *, max_rows: int) -> Iterator[list[Request]]:
    """Requests that decode together: equally many samples, similar lengths, at most so many rows."""
    groups: dict[int, list[list[Request]]] = {}
    for request in requests:
        prompts = groups.setdefault(request.params.n, [])
        if not prompts or prompts[-1][0].prompt_index != request.prompt_index:
            prompts.append([])
        prompts[-1].append(request)
    for n, prompts in groups.items():
        prompts.sort(key=_prompt_tokens)
        size = max(1, max_rows // n)
        padded = [prompts] if not _is_recurrent(lm) else [list(alike) for _, alike in groupby(prompts, _prompt_tokens)]
        for alike in padded:
            for start in range(0, len(alike), size):
                yield [request for samples in alike[start : start + size] for request in samples]


def _prompt_tokens(samples: Sequence[Request]) -> int:
    return len(samples[0].prompt)


def _is_recurrent(lm: PreTrainedModel) -> bool:
    """Whether a model has layers whose state takes in all that it is shown, padding too."""
    return bool(getattr(lm, "_is_stateful", False))


def _has_rows(cache: DynamicCache) -> bool:
    """Whether all that a cache keeps can be taken row by row."""
    return bool(cache.layers) and all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
