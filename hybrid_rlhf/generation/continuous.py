"""Continuous batching: requests enter as others leave, and every step decodes all that are under way.

A step is either a prefill of requests that enter, or one token for each live row. Live rows are the first slots of
the cache, always: when one ends, the last takes its slot. What a prompt shares with one that is being answered is
copied from its slot and not computed again, so the prompt of `n` samples and a common system prompt are read once.
On a GPU a step is looked at while the next one runs: a row that has ended takes part in one more, which nobody sees.

Shapes: T tokens, B live rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_rlhf.generation.attention import Span
from hybrid_rlhf.generation.prefixes import PrefixIndex
from hybrid_rlhf.generation.requests import Request
from hybrid_rlhf.generation.workspace import Fetch, Workspace

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

    def __init__(self, workspace: Workspace, requests: Sequence[Request], *, prefill_tokens: int) -> None:
        """Prepare.

        Args:
            workspace: with a slot or more, each long enough for any of the requests.
            requests: samples of one prompt stand together.
            prefill_tokens: read at once, at most; a longer prompt is read in chunks.
        """
        self._workspace, self._decoder, self._cache = workspace, workspace.decoder, workspace.cache
        self._waiting = deque(requests)
        self._rows: list[Request] = []
        self._flying: deque[tuple[list[Request], Fetch]] = deque()
        self._prefixes = PrefixIndex()
        self._prefill_tokens = prefill_tokens
        self._enough_free = max(1, self._cache.slots // 8)
        self._device = self._cache.keys.device
        self.decode_steps = 0
        """So far."""

    @torch.inference_mode()
    def steps(self) -> Iterator[Added]:
        """Run to the end; after each step, the tokens it added."""
        while self._waiting or self._rows:
            free = self._cache.slots - len(self._rows)
            if self._waiting and free >= min(len(self._waiting), self._enough_free):
                while self._flying:
                    yield self._land()
                while self._waiting and len(self._rows) < self._cache.slots:
                    yield self._prefill(self._admit())
            else:
                self.decode_steps += 1
                self._flying.append((self._rows, self._workspace.decode(self._rows)))
                if len(self._flying) > self._workspace.lag:
                    yield self._land()

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
        fetch = self._workspace.first_tokens(logits, len(self._rows), entered)
        self._rows = self._rows + entered
        for request in entered:
            self._prefixes.add(request)
        return self._take(entered, fetch)

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
            self._workspace.attention.prefill(spans),
        )
        end = 0
        for (start, length), group in pieces.items():
            for entry in group:
                end += length
                entry.done = start + length
                if entry.done == len(entry.prompt):
                    entry.hidden = hidden[end - 1]

    def _land(self) -> Added:
        """Look at the oldest step that was started."""
        return self._take(*self._flying.popleft())

    def _take(self, requests: Sequence[Request], fetch: Fetch) -> Added:
        """Give requests the tokens of a step, and let go those that end; one that had ended before gets none."""
        added: Added = []
        for request, token, *logprobs in zip(requests, *fetch(), strict=True):
            if request.finish_reason is None:
                request.take(int(token), *logprobs)
                added.append((request, int(token)))
        if any(request.finish_reason for request, _ in added):
            self._rows = self._compacted()
        return added

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
                self._workspace.rows.move(len(rows), slot)
        return rows
