"""Continuous batching: requests enter as others leave, and every step decodes all that are under way.

A step is either a prefill of requests that enter, or one token for each live row. Live rows are the first slots of
the cache, always: when one ends, the last takes its slot. What a prompt shares with one that is being answered is
copied from its slot and not computed again, so the prompt of `n` samples and a common system prompt are read once.

Shapes: T tokens, B live rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_rlhf.generation.attention import Attention, Span
from hybrid_rlhf.generation.cache import KVCache
from hybrid_rlhf.generation.decoder import Decoder
from hybrid_rlhf.generation.prefixes import PrefixIndex
from hybrid_rlhf.generation.requests import Request
from hybrid_rlhf.generation.sampler import Sampler

Added = list[tuple[Request, int]]


@dataclass
class _Entry:
    """A prompt that enters, for one sample or more of it."""

    requests: list[Request]
    slot: int
    """Of the first sample; the others follow it."""
    done: int
    """Tokens that the slot holds already."""
    hidden: Tensor | None = field(default=None)
    """[H] after the last token, once it is read."""

    @property
    def prompt(self) -> Sequence[int]:
        return self.requests[0].prompt


class ContinuousBatch:
    """Runs requests to their ends."""

    def __init__(self, decoder: Decoder, cache: KVCache, requests: Sequence[Request], *, prefill_tokens: int) -> None:
        """Prepare.

        Args:
            decoder: computes.
            cache: with a slot or more, each long enough for any of the requests.
            requests: samples of one prompt stand together.
            prefill_tokens: read at once, at most; a longer prompt is read in chunks.
        """
        self._decoder, self._cache = decoder, cache
        self._attention = Attention(decoder.architecture, decoder.split, cache)
        self._sampler = Sampler(decoder.architecture.vocab_size, decoder.world)
        self._waiting = deque(requests)
        self._rows: list[Request] = []
        self._prefixes = PrefixIndex()
        self._prefill_tokens = prefill_tokens
        self._enough_free = max(1, cache.slots // 8)
        self._device = cache.keys.device

    @torch.inference_mode()
    def steps(self) -> Iterator[Added]:
        """Run to the end; after each step, the tokens it added."""
        while self._waiting or self._rows:
            free = self._cache.slots - len(self._rows)
            if self._waiting and free >= min(len(self._waiting), self._enough_free):
                while self._waiting and len(self._rows) < self._cache.slots:
                    yield self._prefill(self._admit())
            else:
                yield self._decode()

    def _admit(self) -> list[_Entry]:
        """The requests that enter next, with what their slots can copy from others already there.

        A prompt that would share more with one that enters now than with any that is there waits until that one is
        read.
        """
        entries: list[_Entry] = []
        entering, put_off = PrefixIndex(), []
        slot, tokens = len(self._rows), 0
        while self._waiting and slot < self._cache.slots and tokens < self._prefill_tokens:
            request = self._waiting.popleft()
            if entries and entries[-1].requests[0].prompt_index == request.prompt_index:
                entries[-1].requests.append(request)
                slot += 1
                continue
            donor, shared = self._prefixes.longest(request.prompt)
            if entering.longest(request.prompt)[1] > shared:
                put_off.append(request)
                continue
            if donor is not None:
                self._cache.copy(self._rows.index(donor), [slot], shared)
            entries.append(_Entry([request], slot, shared))
            entering.add(request)
            slot += 1
            tokens += len(request.prompt) - shared
        self._waiting.extendleft(reversed(put_off))
        return entries

    def _prefill(self, entries: list[_Entry]) -> Added:
        """Read the prompts of entries, in chunks, and draw their first tokens."""
        unread = list(entries)
        while unread:
            self._read(unread, self._prefill_tokens)
            unread = [entry for entry in unread if entry.hidden is None]
        for entry in entries:
            self._cache.copy(entry.slot, range(entry.slot + 1, entry.slot + len(entry.requests)), len(entry.prompt))
        hidden = torch.stack([entry.hidden for entry in entries if entry.hidden is not None])
        of_request = [index for index, entry in enumerate(entries) for _ in entry.requests]
        logits = self._decoder.logits(hidden)[torch.tensor(of_request, device=self._device)]
        entered = [request for entry in entries for request in entry.requests]
        self._rows = self._rows + entered
        for entry in entries:
            for request in entry.requests:
                self._prefixes.add(request)
        return self._take(logits, entered)

    def _read(self, entries: list[_Entry], budget: int) -> None:
        """One forward over as many tokens of prompts as the budget allows, equal stretches side by side."""
        pieces: dict[tuple[int, int], list[_Entry]] = {}
        for entry in entries:
            length = min(len(entry.prompt) - entry.done, budget)
            if length:
                pieces.setdefault((entry.done, length), []).append(entry)
            budget -= length
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        for (start, length), group in pieces.items():
            spans.append(Span([entry.slot for entry in group], start, length))
            for entry in group:
                tokens += entry.prompt[start : start + length]
                positions += range(start, start + length)
        hidden = self._decoder.hidden(
            torch.tensor(tokens, device=self._device),
            torch.tensor(positions, device=self._device),
            self._attention.prefill(spans),
        )
        end = 0
        for (start, length), group in pieces.items():
            for entry in group:
                end += length
                entry.done = start + length
                if entry.done == len(entry.prompt):
                    entry.hidden = hidden[end - 1]

    def _decode(self) -> Added:
        """One token for every live row."""
        tokens = torch.tensor([row.token_ids[-1] for row in self._rows], device=self._device)
        places = [row.tokens - 1 for row in self._rows]
        positions = torch.tensor(places, device=self._device)
        attend = self._attention.decode(positions, shortest=min(places) + 1, longest=max(places) + 1)
        return self._take(self._decoder.logits(self._decoder.hidden(tokens, positions, attend)), self._rows)

    def _take(self, logits: Tensor, requests: Sequence[Request]) -> Added:
        """Draw a token for each request, and let go those that end."""
        drawn = self._sampler(logits, requests)
        tokens: list[int] = drawn.tokens.tolist()
        columns = (tokens, drawn.logprobs.tolist(), drawn.sampling_logprobs.tolist())
        for request, token, logprob, sampling_logprob in zip(requests, *columns, strict=True):
            request.take(token, logprob, sampling_logprob)
        if any(request.finish_reason for request in requests):
            self._rows = self._compacted()
        return list(zip(requests, tokens, strict=True))

    def _compacted(self) -> list[Request]:
        """The rows that go on, in slots 0, 1, ...: the last one takes the place of one that has ended."""
        rows = list(self._rows)
        for slot in reversed(range(len(rows))):
            if rows[slot].finish_reason is None:
                continue
            self._prefixes.remove(rows[slot])
            last = rows.pop()
            if slot < len(rows):
                rows[slot] = last
                self._cache.copy(len(rows), [slot], last.tokens)
        return rows
