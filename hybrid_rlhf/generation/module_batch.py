"""A batch of rows that decode together through the Hugging Face module and its cache.

Prompts are left-padded; position ids count real tokens. The prompt of `n` samples is read once. Rows that have ended
are taken out of the batch when half of it has, so that they cost nothing.

Shapes: P prompts, B = live rows, T tokens so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hybrid_rlhf.generation.sampling import Completion, SamplingParams, draw, uniform_stream


@dataclass
class _Row:
    """One sample under way."""

    uniforms: Tensor
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


class BatchDecoder:
    """Decodes prompts that share their sampling parameters, seeds apart."""

    def __init__(
        self,
        lm: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        stop: frozenset[int],
    ) -> None:
        self._lm = lm
        self._device = next(lm.parameters()).device
        self._params = sampling[0]
        self._stop = stop | set(self._params.stop_token_ids)
        self._prompts = prompts
        self._rows = [
            _Row(uniform_stream(p.seed or 0, sample, p.max_new_tokens)) for p in sampling for sample in range(p.n)
        ]
        self._live = list(range(len(self._rows)))
        accepted = inspect.signature(lm.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted

    def completions(self) -> list[list[Completion]]:
        """The samples of each prompt."""
        done = [Completion(row.token_ids, row.logprobs, "stop" if row.stopped else "length") for row in self._rows]
        n = self._params.n
        return [done[i : i + n] for i in range(0, len(done), n)]

    @torch.no_grad()
    def steps(self) -> Iterator[list[tuple[int, int]]]:
        """Decode to the end; after each step, the (row, token) pairs it added."""
        mask, cache, logits = self._prefill()
        for step in range(self._params.max_new_tokens):
            uniforms = torch.stack([self._rows[i].uniforms[step] for i in self._live]).to(self._device)
            tokens, logprobs = draw(logits, uniforms, self._params)
            yield self._take(tokens.tolist(), logprobs.tolist())
            going = [slot for slot, i in enumerate(self._live) if not self._rows[i].stopped]
            if not going or step + 1 == self._params.max_new_tokens:
                return
            if 2 * len(going) <= len(self._live):
                kept = torch.tensor(going, device=self._device)
                cache.batch_select_indices(kept)
                mask, tokens = mask[kept], tokens[kept]
                self._live = [self._live[slot] for slot in going]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = self._forward(tokens[:, None], mask, cache)

    def _prefill(self) -> tuple[Tensor, DynamicCache, Tensor]:
        longest = max(len(prompt) for prompt in self._prompts)
        ids = torch.zeros(len(self._prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(self._prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        cache = DynamicCache(config=self._lm.config)
        logits = self._forward(ids, mask, cache)
        n = self._params.n
        if n > 1:
            cache.batch_repeat_interleave(n)
            mask, logits = mask.repeat_interleave(n, dim=0), logits.repeat_interleave(n, dim=0)
        return mask, cache, logits

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Next-token logits [B, V]."""
        extra: dict[str, object] = {}
        if self._takes_positions:
            extra["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if self._takes_logits_to_keep:
            extra["logits_to_keep"] = 1
        output = self._lm(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _take(self, tokens: list[int], logprobs: list[float]) -> list[tuple[int, int]]:
        added = []
        for i, token, logprob in zip(self._live, tokens, logprobs, strict=True):
            row = self._rows[i]
            if row.stopped:
                continue
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.stopped = token in self._stop
            added.append((i, token))
        return added
