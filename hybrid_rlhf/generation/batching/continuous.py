"""Continuous batching: requests enter as others finish, and every step decodes all live rows.

A step is either a prefill of new requests, or one token for each live row. Live rows always occupy the first slots of
the KV cache: when a row finishes, the last row moves to its slot. A prefix that a prompt shares with that of a live row
is copied from its slot, so the prompt of `n` samples and a common system prompt are computed once. On a GPU, scheduling
is asynchronous: the host processes the result of a step while the next one runs, so a finished row runs one extra step
whose output is discarded.

Shapes: T tokens, B live rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_rlhf.generation.batching.prefixes import PrefixIndex
from hybrid_rlhf.generation.batching.requests import NewTokens, Request
from hybrid_rlhf.generation.batching.workspace import Fetch, Workspace
from hybrid_rlhf.generation.model.attention import Span


@dataclass
class _Prefill:
    """A prompt to be computed, for one or more of its samples."""

    requests: list[Request]
    slot: int
    """Of the first sample; the others use the slots after it."""
    done_tokens: int
    """Prompt tokens whose keys and values are in the slot."""
    hidden: Tensor | None = field(default=None)
    """[H] after the last token, once computed."""

    @property
    def prompt(self) -> Sequence[int]:
        return self.requests[0].prompt


class ContinuousBatch:
    """Decodes requests to their ends."""

    def __init__(self, workspace: Workspace, requests: Sequence[Request], *, prefill_tokens: int) -> None:
        """Prepare.

        Args:
            workspace: with at least one slot, each long enough for any of the requests.
            requests: ordered by prompt.
            prefill_tokens: most prompt tokens of one prefill; a longer prompt is computed in chunks.
        """
        self._workspace, self._decoder, self._cache = workspace, workspace.decoder, workspace.cache
        self._waiting = deque(requests)
        self._rows: list[Request] = []
        self._in_flight: deque[tuple[list[Request], Fetch]] = deque()
        self._prefixes = PrefixIndex()
        self._prefill_tokens = prefill_tokens
        self._min_free_slots = max(1, self._cache.slots // 8)
        self._device = self._cache.keys.device
        self.decode_steps = 0
        """Decoding steps so far."""

    @torch.inference_mode()
    def steps(self) -> Iterator[NewTokens]:
        """Decode to the end; yields the new tokens of each step."""
        while self._waiting or self._rows:
            free = self._cache.slots - len(self._rows)
            if self._waiting and free >= min(len(self._waiting), self._min_free_slots):
                while self._in_flight:
                    yield self._collect()
                while self._waiting and len(self._rows) < self._cache.slots:
                    yield self._run_prefills(self._admit())
            else:
                self.decode_steps += 1
                self._in_flight.append((self._rows, self._workspace.decode(self._rows)))
                if len(self._in_flight) > self._workspace.steps_in_flight:
                    yield self._collect()

    def _admit(self) -> list[_Prefill]:
        """Take the next requests from the queue, and copy the prefixes that they share with live rows.

        A prompt that shares a longer prefix with one admitted now than with any live row is deferred until that one is
        computed.
        """
        prefills: list[_Prefill] = []
        admitted, deferred = PrefixIndex(), []
        slot, tokens = len(self._rows), 0
        while self._waiting and slot < self._cache.slots and tokens < self._prefill_tokens:
            request = self._waiting.popleft()
            if prefills and prefills[-1].requests[0].prompt_index == request.prompt_index:
                prefills[-1].requests.append(request)
                slot += 1
                continue
            donor, shared = self._prefixes.longest(request.prompt)
            if admitted.longest(request.prompt)[1] > shared:
                deferred.append(request)
                continue
            if donor is not None:
                self._cache.copy(self._rows.index(donor), [slot], shared)
            prefills.append(_Prefill([request], slot, shared))
            admitted.add(request)
            slot += 1
            tokens += len(request.prompt) - shared
        self._waiting.extendleft(reversed(deferred))
        return prefills

    def _run_prefills(self, prefills: list[_Prefill]) -> NewTokens:
        """Compute prompts, in chunks, and sample the first tokens of their completions."""
        unfinished = list(prefills)
        while unfinished:
            self._run_chunk(unfinished, self._prefill_tokens)
            unfinished = [prefill for prefill in unfinished if prefill.hidden is None]
        for one in prefills:
            self._cache.copy(one.slot, range(one.slot + 1, one.slot + len(one.requests)), len(one.prompt))
        hidden = torch.stack([prefill.hidden for prefill in prefills if prefill.hidden is not None])
        of_request = [index for index, prefill in enumerate(prefills) for _ in prefill.requests]
        logits = self._decoder.logits(hidden)[torch.tensor(of_request, device=self._device)]
        entered = [request for prefill in prefills for request in prefill.requests]
        fetch = self._workspace.first_tokens(logits, len(self._rows), entered)
        self._rows = self._rows + entered
        for request in entered:
            self._prefixes.add(request)
        return self._append(entered, fetch)

    def _run_chunk(self, prefills: list[_Prefill], budget_tokens: int) -> None:
        """One forward over as many prompt tokens as the budget allows, grouped by position and length."""
        pieces: dict[tuple[int, int], list[_Prefill]] = {}
        for prefill in prefills:
            length = min(len(prefill.prompt) - prefill.done_tokens, budget_tokens)
            if length:
                pieces.setdefault((prefill.done_tokens, length), []).append(prefill)
            budget_tokens -= length
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        for (start, length), group in pieces.items():
            spans.append(Span([prefill.slot for prefill in group], start, length))
            for prefill in group:
                tokens += prefill.prompt[start : start + length]
                positions += range(start, start + length)
        hidden = self._decoder.hidden(
            torch.tensor(tokens, device=self._device),
            torch.tensor(positions, device=self._device),
            self._workspace.attention.prefill(spans),
        )
        end = 0
        for (start, length), group in pieces.items():
            for prefill in group:
                end += length
                prefill.done_tokens = start + length
                if prefill.done_tokens == len(prefill.prompt):
                    prefill.hidden = hidden[end - 1]

    def _collect(self) -> NewTokens:
        """Wait for the oldest step in flight and process its result."""
        return self._append(*self._in_flight.popleft())

    def _append(self, requests: Sequence[Request], fetch: Fetch) -> NewTokens:
        """Append the tokens of a step to its requests, except those that had finished before, and free their slots."""
        new: NewTokens = []
        for request, token, *logprobs in zip(requests, *fetch(), strict=True):
            if request.finish_reason is None:
                request.append(int(token), *logprobs)
                new.append((request, int(token)))
        if any(request.finish_reason for request, _ in new):
            self._rows = self._compacted()
        return new

    def _compacted(self) -> list[Request]:
        """The unfinished rows, in slots 0, 1, ...: the last row moves to the slot of each finished one."""
        rows = list(self._rows)
        for slot in reversed(range(len(rows))):
            if rows[slot].finish_reason is None:
                continue
            self._prefixes.remove(rows[slot])
            last = rows.pop()
            if slot < len(rows):
                rows[slot] = last
                self._cache.copy(len(rows), [slot], last.tokens)
                self._workspace.rows.move(len(rows), slot)
        return rows
