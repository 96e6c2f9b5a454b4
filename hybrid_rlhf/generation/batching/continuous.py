"""Continuous batching: requests enter as others finish, and every step decodes all live rows.

A step computes, in one forward, one token of each live row and, within a budget, chunks of the prompts of entering
requests. A prompt reuses the longest cached prefix (blocks.py); the samples of one prompt share its blocks and copy its
states in recurrent layers. States are saved when a request leaves, after the last whole block of a prompt, and after a
long common prefix of two prompts.
Memory limits the number of running requests: a request enters if it fits beside the expected growth of the live ones.
If blocks run out nevertheless, the youngest request is preempted: it releases its blocks, waits, and is computed again
from its tokens. The oldest is never preempted, so all requests finish. On a GPU, scheduling is asynchronous: the host
processes the result of a step while the next one runs, so a finished row runs one extra step whose output is
discarded.

The host must be faster than the kernels of a small model, so what changes in every step is in arrays: the one loop over
all rows looks for those that have ended. Others visit the rows that cross a boundary of blocks or may end, or all rows
where a stream, a stop string or a grammar needs each token. Results are split among the requests later.

Source: arXiv 2309.06180, section 4.5 (preemption by recomputation); chunked prefill: arXiv 2308.16369.

Shapes: T tokens, B live rows.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hybrid_rlhf.generation.batching.blocks import BlockPool, BlockTable, Match
from hybrid_rlhf.generation.batching.grammar import PendingMasks
from hybrid_rlhf.generation.batching.images import EncodedPrompts
from hybrid_rlhf.generation.batching.requests import DecodeWork, NewTokens, Request
from hybrid_rlhf.generation.batching.workspace import Fetch, Masks, Prompts, Workspace
from hybrid_rlhf.generation.model.attention import Chunks
from hybrid_rlhf.generation.model.cache import BLOCK_TOKENS, blocks_of
from hybrid_rlhf.generation.model.images import image_tokens, rotated_positions, two_way_spans
from hybrid_rlhf.generation.model.recurrent.states import StateCache
from hybrid_rlhf.generation.transfers import to_device
from hybrid_rlhf.models.vision import EncodedImages

_SPLIT_STEPS = 64
"""Number of steps after which their results are split among the requests."""


@dataclass(eq=False)
class LiveRow:
    """A running request."""

    request: Request
    age: int
    """Index in the order of arrival."""
    table: BlockTable
    slot: int
    """Slot of its states in recurrent layers, and of its results."""
    computed: int = 0
    """Number of tokens whose keys and values are in the cache, including those of launched steps. While it decodes, it
    is set at boundaries of blocks."""
    stops: tuple[int, ...] = ()
    """Numbers of prompt tokens after which the states are saved."""
    samples: list[LiveRow] = field(default_factory=list)
    """Further samples of the prompt, which enter together with this one."""
    images: EncodedImages | None = None
    """Images of the prompt until it is computed; none: it has none that are not cached."""

    def next_chunk(self, budget: int) -> int:
        """Number of prompt tokens that the next step computes: at most `budget`, unless it begins in an image whose
        tokens attend to each other in both directions, which a chunk never ends in."""
        stop = next((stop for stop in self.stops if stop > self.computed), self.request.tokens)
        end = min(self.computed + max(0, budget), stop)
        if end > self.computed:
            for first, after in two_way_spans([(self.images, end - 1, end)])[0]:
                if after > end:
                    end = first if first > self.computed else after
        return end - self.computed


@dataclass(frozen=True)
class RowStates:
    """States of live rows in recurrent layers, and saved states of cached prefixes. Does nothing without such
    layers."""

    live: StateCache | None
    """States of live rows, by their slots."""
    saved: StateCache | None
    """Saved states, by the slots of the pool."""
    pool: BlockPool

    def begin(self, row: LiveRow, match: Match) -> None:
        """Copy the saved states of a matched prefix to a row."""
        row.stops = match.stops
        if self.live is not None and match.state is not None and row.computed:
            self.live.copy([(match.state, row.slot)], source=self.saved)

    def fork(self, rows: Sequence[LiveRow]) -> None:
        """Copy the states of rows to their further samples."""
        if self.live is not None:
            self.live.copy([(row.slot, sample.slot) for row in rows for sample in row.samples])

    def save(self, row: LiveRow) -> None:
        """Save the states of a row for later sequences with the same prefix. The blocks of its tokens must be
        indexed."""
        discarded = row.computed > row.request.tokens  # the states include a token that was dropped
        if self.saved is None or discarded or row.table.outdated:
            return
        slot = self.pool.save_state(row.request.keys[: row.computed], row.request.adapter)
        if slot is not None:
            self.saved.copy([(row.slot, slot)], source=self.live)


@dataclass
class LaunchedStep:
    """A step that was launched and whose rows are still in the batch."""

    rows: list[LiveRow]
    numbers: np.ndarray
    """[4, rows]: `ContinuousBatch._numbers` after its launch."""
    fetch: Fetch
    new: NewTokens | None = None
    """Its tokens, once they are fetched."""


@dataclass
class ExpectedLength:
    """Expected length of a completion: sampled tokens, also discarded ones, per finished completion.

    This is the maximum likelihood estimate for a constant probability to end at each token, with running completions
    as censored observations. Before any completion has finished, it is half of the limit.
    """

    tokens: float = 0.0
    finished: float = 0.0

    def of(self, limit: Any) -> Any:
        """Expected number of tokens of a completion that is limited to `limit` tokens; numbers or arrays."""
        return np.minimum(limit, (self.tokens + limit / 2) / (self.finished + 1))


@dataclass(frozen=True)
class BatchLoad:
    """Load of a batch."""

    rows: int = 0
    """Number of running requests."""
    waiting: int = 0
    """Number of requests that wait for rows or memory."""
    used_pages: int = 0
    """Number of KV cache pages that running requests use."""
    pages: int = 0
    """Number of pages of the KV cache."""


class ContinuousBatch:
    """Decodes requests until all are finished."""

    def __init__(
        self,
        workspace: Workspace,
        pool: BlockPool,
        requests: Sequence[Request],
        *,
        prefill_tokens: int,
        encoded: EncodedPrompts,
        saved_states: StateCache | None = None,
        rows: int | None = None,
    ) -> None:
        """Queue requests; `steps` runs them.

        Args:
            workspace: tables with at least one row.
            pool: blocks of the workspace's cache, with pages for any one request at its full length.
            requests: ordered by prompt.
            prefill_tokens: maximum number of prompt tokens per step; a longer prompt is computed in chunks.
            encoded: images of earlier prompts.
            saved_states: states of cached prefixes, in the slots of the pool; none: there are no recurrent layers.
            rows: maximum number of requests decoded together; none: those of the workspace.
        """
        self._workspace = workspace
        self._most_rows = min(workspace.most_rows, rows or workspace.most_rows)
        self._pool = pool
        self._states = RowStates(workspace.states, saved_states, pool)
        self._encoded = encoded
        self._has_axes = workspace.decoder.architecture.has_axes
        self._waiting: deque[tuple[int, Request]] = deque()
        self._ages = itertools.count()
        self._decoding: list[LiveRow] = []
        self._numbers = np.zeros((4, workspace.most_rows), np.int64)
        """Of decoding rows: the slot, and the numbers of tokens that are computed, of the prompt, and at most of the
        completion."""
        self._results = np.empty((3, 2 * _SPLIT_STEPS, 1 + workspace.most_rows))
        """Tokens, log-probs and sampling log-probs that were not split yet, by place in the sequence (modulo the number
        of steps) and slot."""
        self._streams = any(request.streams for request in requests)
        """True if requests need each token when it is sampled, as all do in a batch to which others are added."""
        self._stops = {token for request in requests for token in request.stop}
        self._entering: list[LiveRow] = []
        """Rows whose prompts are not fully computed, oldest first; further samples of a prompt are in
        `LiveRow.samples`."""
        self._in_flight: deque[LaunchedStep] = deque()
        self._last = LaunchedStep([], self._numbers[:, :0], lambda: self._results)
        """The last step whose results have arrived."""
        self._prefill_tokens = prefill_tokens
        self._slots = list(range(workspace.most_rows, 0, -1))
        """Slots that no live row uses."""
        self._boundaries = [1, *((window - 1) % BLOCK_TOKENS for window in pool.layout.windows if window)]
        """Lengths, modulo BLOCK_TOKENS, at which a row needs another block or leaves one."""
        self._expected = ExpectedLength()
        self._preempted = False
        """True after a preemption: no request enters until a row has finished."""
        self._device = workspace.pages.device
        self.work = DecodeWork()
        """Decoding work so far, without bytes."""
        self.preemptions = 0
        """Number of preemptions so far."""
        self.add(requests)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue further requests while `steps` is suspended. Each must fit in workspace and pool."""
        self._waiting.extend(zip(self._ages, requests, strict=False))

    def cancel(self, requests: Collection[Request]) -> None:
        """End requests early and release their blocks while `steps` is suspended."""
        gone = {request for request in requests if not request.ended}
        if not gone:
            return
        for request in gone:
            request.finish_reason = "cancelled"
        self._remove({row for row in self._decoding if row.request in gone})
        for rows in [(row, *row.samples) for row in self._entering]:
            if not gone.isdisjoint(row.request for row in rows):  # the others find the prompt in the cache
                for row in reversed(rows):
                    self._preempt(row)
        self._waiting = deque(entry for entry in self._waiting if entry[1] not in gone)
        self._preempted = False

    def drain(self) -> NewTokens:
        """Wait for all launched steps while `steps` is suspended; returns their tokens."""
        new = NewTokens()
        while self._in_flight:
            new += self._collect()
        return new

    def renew(self, *, recompute: bool) -> None:
        """Continue with other weights, while `steps` is suspended and no step is in flight.

        Args:
            recompute: compute the keys and values of running requests again, by preemption; false: keep them, and
                share them with no later request.
        """
        if not recompute:
            for row in self._live:
                row.table.outdated = True
            return
        for row in sorted(self._live, key=lambda row: row.age, reverse=True):
            self._preempt(row)
        self._preempted = False

    @property
    def unfinished(self) -> list[Request]:
        """All requests that have not ended."""
        return [*(row.request for row in self._live), *(request for _, request in self._waiting)]

    @property
    def load(self) -> BatchLoad:
        """Numbers of running and waiting requests, and of pages."""
        return BatchLoad(len(self._live), len(self._waiting), self._pool.used_pages, self._pool.pages)

    @torch.inference_mode()
    def steps(self) -> Generator[NewTokens, None, None]:
        """Decode to the end; yields the new tokens of each step."""
        try:
            while self._waiting or self._decoding or self._entering:
                lacks_pages = self._pages_missing() > self._pool.available_pages
                if lacks_pages and self._in_flight:
                    yield self._collect()
                elif lacks_pages:
                    self.preemptions += 1
                    self._preempted = True
                    self._preempt(max(self._live, key=lambda row: row.age))
                else:
                    self._launch()
                    while len(self._in_flight) > self._workspace.steps_in_flight:
                        yield self._collect()
        finally:
            self._release_all()

    @property
    def _live(self) -> list[LiveRow]:
        return [*self._decoding, *(live_row for row in self._entering for live_row in (row, *row.samples))]

    def _pages_missing(self) -> int:
        """Number of pages that the next step allocates for the rows that are already live."""
        lengths = self._numbers[1, : len(self._decoding)]
        missing = int((lengths % BLOCK_TOKENS == 0).sum()) * self._pool.layout.tables
        budget = self._prefill_tokens
        for row in self._entering:
            length = row.next_chunk(budget)
            missing += row.table.missing_pages(row.computed + length)
            budget -= length
            if row.computed + length == row.request.tokens:
                copied = self._pool.layout.tables if row.request.tokens % BLOCK_TOKENS else 0
                missing += len(row.samples) * copied
        return missing

    # -- one step

    def _launch(self) -> None:
        """Start the next step."""
        batch = len(self._decoding)
        crossing, longest = self._extend()
        chunks = self._chunks()
        finished = [row for row, start, length in chunks if start + length == row.request.tokens]
        entered = [sample for row in finished for sample in (row, *row.samples)]
        forks = list[tuple[int, int]]()
        for row in finished:
            for sample in row.samples:
                sample.computed = row.computed
                forks += sample.table.fork(row.table, row.computed)
        entries = [(place, len(row.table.blocks) - 1, row.table.page_table(-1)[0]) for place, row in crossing]
        for place, row in enumerate(entered, start=batch):
            entries += [(place, block, pages) for block, pages in enumerate(row.table.page_table())]
        self._workspace.set_pages(entries)
        masks = self._masks([*self._decoding, *entered])
        if chunks:
            tables = self._pool.layout.tables
            prompts = _prompts_of(chunks, finished, tables=tables, device=self._device, has_axes=self._has_axes)
            requests = [row.request for row in entered]
            slots = [row.slot for row in entered]
            fetch = self._workspace.prefill(batch, prompts, requests, slots, longest=longest, masks=masks)
        else:
            fetch = self._workspace.decode(batch, longest=longest, masks=masks)
        self._workspace.cache.copy(forks)
        self._states.fork(finished)
        for row, start, length in chunks:
            row.table.set_ready(start, start + length, of=row.request.tokens)
            if start + length in row.stops:
                self._states.save(row)
        for row in finished:
            row.table.index(row.request.keys)
            row.images = None
        if entered:
            self._entering = [row for row in self._entering if row not in finished]
            self._decoding = self._decoding + entered
            for place, row in enumerate(entered, start=batch):
                self._numbers[:, place] = row.slot, *row.request.numbers
        if any(self._pool.layout.windows):
            for row in (*(row for _, row in crossing), *entered, *self._entering):
                row.table.trim(row.computed)
        numbers = self._numbers[:, : len(self._decoding)].copy()
        self._in_flight.append(LaunchedStep(self._decoding, numbers, fetch))
        self.work += DecodeWork(steps=int(batch > 0))

    def _masks(self, rows: Sequence[LiveRow]) -> Masks | None:
        """Masks of the next step for the rows, by place, that have grammars; None: there are none.

        Tokens in flight decide which ones a grammar allows next: they are awaited while the model computes the step.
        """
        if self._workspace.rows.allowed is None or all(row.request.grammar is None for row in rows):
            return None

        def begin() -> PendingMasks:
            for step in self._in_flight:
                self._take(step)
            live = [(place, row.request) for place, row in enumerate(rows) if not row.request.ended]
            return self._workspace.begin_masks([(place, r.grammar) for place, r in live if r.grammar is not None])

        if self._in_flight:
            return begin
        pending = begin()
        return lambda: pending

    def _extend(self) -> tuple[list[tuple[int, LiveRow]], int]:
        """Allocate the next token of each decoding row; returns the rows that cross a boundary of blocks, with their
        places, and the tokens of the longest row."""
        lengths = self._numbers[1, : len(self._decoding)]
        lengths[:] = np.minimum(lengths + 1, self._workspace.capacity_tokens)
        places = np.flatnonzero(np.isin(lengths % BLOCK_TOKENS, self._boundaries)).tolist()
        crossing = [(place, self._decoding[place]) for place in places]
        for place, row in crossing:
            row.computed = int(lengths[place])
            row.table.extend(row.computed)
        return crossing, int(lengths.max(initial=1))

    def _chunks(self) -> list[tuple[LiveRow, int, int]]:
        """Admit requests and allocate the chunks of the next step; returns them as (row, start, length)."""
        budget = self._prefill_tokens
        chunks = list[tuple[LiveRow, int, int]]()
        for entering in self._entering:
            budget -= self._append_chunk(chunks, entering, budget)
        room = self._room() if self._waiting else 0
        if self._may_enter(room):
            while budget > 0 and (row := self._next_entering(room)) is not None:
                room -= sum(self._expected_pages(sample.request) for sample in (row, *row.samples))
                budget -= self._append_chunk(chunks, row, budget)
        return chunks

    def _append_chunk(self, chunks: list[tuple[LiveRow, int, int]], row: LiveRow, budget: int) -> int:
        length = row.next_chunk(budget)
        if length:
            chunks.append((row, row.computed, length))
            row.computed += length
            row.table.extend(row.computed)
            # Requests admitted next may share the blocks: the step computes them before it reads them.
            row.table.index(row.request.keys[: row.computed // BLOCK_TOKENS * BLOCK_TOKENS])
        return length

    # -- admission and preemption

    def _may_enter(self, room: int) -> bool:
        """True if there is room for several requests, since prompts are cheaper to compute together."""
        live = len(self._live)
        wanted = min(len(self._waiting), max(1, live // 8))
        if not live or not wanted:
            return bool(wanted)
        if self._preempted or live + wanted > self._most_rows:
            return False
        return room >= wanted * self._expected_pages(self._waiting[0][1])

    def _room(self) -> int:
        """Number of available pages, minus the expected growth of the live rows."""
        _, *numbers = self._numbers[:, : len(self._decoding)]
        growth = np.maximum(0, self._expected_blocks(*numbers) - blocks_of(numbers[0])).sum()
        for row in self._entering:
            shared = row.request.tokens // BLOCK_TOKENS
            growth += sum(self._expected_blocks(*sample.request.numbers) - shared for sample in row.samples)
            growth += max(0, self._expected_blocks(*row.request.numbers) - len(row.table.blocks))
        return int(self._pool.available_pages - growth * self._pool.layout.tables)

    def _expected_blocks(self, tokens: Any, prompt: Any, limit: Any) -> Any:
        """Number of blocks at the expected end of requests, or after the next token if they are already past that.

        `tokens`, `prompt`, `limit`: numbers of tokens so far, of the prompt, and at most of the completion.
        """
        return blocks_of(np.maximum(tokens + 1, prompt + np.floor(self._expected.of(limit))))

    def _expected_pages(self, request: Request) -> int:
        return int(self._expected_blocks(*request.numbers)) * self._pool.layout.tables

    def _next_entering(self, room: int) -> LiveRow | None:
        """Admit the next request, with the waiting samples of its prompt that fit; None if there is no room."""
        free_rows = self._most_rows - len(self._live)
        if not self._waiting or not free_rows:
            return None
        age, request = self._waiting[0]
        room -= self._expected_pages(request)
        if room < 0 and self._live:
            return None
        self._waiting.popleft()
        row = self._new_row(request, age)
        match = self._pool.match(request.keys, request.adapter)
        row.computed, copies = row.table.begin(match)
        self._workspace.cache.copy(copies)
        self._states.begin(row, match)
        self._entering.append(row)
        if request.images is not None and (self._has_axes or request.images.places[-1] >= row.computed):
            row.images = self._encoded.of(request.images)
        while self._waiting and len(row.samples) + 1 < free_rows:
            age, sample = self._waiting[0]
            room -= self._expected_pages(sample)
            if sample.prompt_index != request.prompt_index or request.token_ids or sample.token_ids or room < 0:
                break
            self._waiting.popleft()
            row.samples.append(self._new_row(sample, age))
        return row

    def _new_row(self, request: Request, age: int) -> LiveRow:
        return LiveRow(request, age, BlockTable(self._pool, request.adapter), self._slots.pop())

    def _preempt(self, row: LiveRow) -> None:
        """Release the blocks of a row, and put its request back into the queue, in order of age."""
        self._split_all()
        if row in self._decoding:
            self._remove({row})
        else:
            self._slots.append(row.slot)
        if row in self._entering:
            row.table.release()
            self._entering.remove(row)
        for leader in self._entering:
            leader.samples = [sample for sample in leader.samples if sample is not row]
        ages = [age for age, _ in self._waiting]
        self._waiting.insert(bisect.bisect(ages, row.age), (row.age, row.request))

    # -- results

    def _collect(self) -> NewTokens:
        """Wait for the oldest step in flight and append its tokens, except those of rows that had already finished."""
        step = self._in_flight.popleft()
        new = self._take(step)
        if self.work.steps % _SPLIT_STEPS == 0:
            self._split_all()
        ended = {row for row in self._decoding if row.request.ended}
        if ended:
            self._preempted = False
            self._remove(ended)
        return new

    def _take(self, step: LaunchedStep) -> NewTokens:
        """Wait for a step and take its results, in the first call; its rows stay in the batch."""
        if step.new is not None:
            return step.new
        new = step.new = NewTokens()
        self._last = step
        values = step.fetch()
        slots, lengths, prompts, limits = step.numbers
        self._results[:, lengths % (2 * _SPLIT_STEPS), slots] = values[:3]
        self._expected.tokens += len(slots)
        may_end = self._streams | (lengths + 1 >= prompts + limits) | np.isin(values[0], [*self._stops])
        places = np.flatnonzero(may_end).tolist()
        for place, (token, *logprobs) in zip(places, values[:, places].T.tolist(), strict=True):
            row = step.rows[place]
            request = row.request
            if request.ended:
                continue
            self._split(row, lengths[place])
            request.append(int(token), *logprobs)
            new.append((request, int(token)))
            if request.ended:
                self._expected.finished += 1
                if request.records_routes:
                    now = self._decoding.index(row)
                    request.fetch_routes = self._workspace.routes_of(now, request.tokens - 1)
        return new

    def _split(self, row: LiveRow, end: int) -> None:
        """Append to a request, unless it has ended, its results up to a place in the sequence."""
        start = row.request.tokens
        if start < end and not row.request.ended:
            places = np.arange(start, end) % (2 * _SPLIT_STEPS)
            row.request.extend(*self._results[:, places, row.slot].tolist())

    def _split_all(self) -> None:
        for row, end in zip(self._last.rows, self._last.numbers[1] + 1, strict=True):
            self._split(row, end)

    def _remove(self, gone: set[LiveRow]) -> None:
        """Remove rows from the batch and release their blocks, which stay in the prefix tree for later sequences.

        The last row moves to the place of each removed row.
        """
        rows = list(self._decoding)
        for place in sorted(map(rows.index, gone), reverse=True):
            row = rows[place]
            row.computed = int(self._numbers[1, place])
            last = rows.pop()
            self._numbers[:, place] = self._numbers[:, len(rows)]
            if place < len(rows):
                rows[place] = last
            self._workspace.move(len(rows), place)
            row.table.set_ready(0, row.computed, of=row.computed)
            row.table.index(row.request.keys[: row.computed])
            self._states.save(row)
            row.table.release()
            self._slots.append(row.slot)
        self._decoding = rows

    def _release_all(self) -> None:
        """Release all blocks, also if the caller stops before the end."""
        self._split_all()
        for row in self._live:
            row.table.release()
        self._workspace.clear()


def _prompts_of(
    chunks: Sequence[tuple[LiveRow, int, int]],
    finished: Sequence[LiveRow],
    *,
    tables: int,
    device: torch.device,
    has_axes: bool,
) -> Prompts:
    """Return the prompts of a step as tensors.

    Args:
        chunks: (row, first token, number of tokens) of each chunk that the step computes.
        finished: rows whose prompts end in this step.
        tables: number of page tables of the cache.
        device: device of the tensors.
        has_axes: tokens of images have three positions.
    """
    tokens = list[int]()
    positions = list[int]()
    last = list[int]()
    adapters = list[int]()
    for row, start, length in chunks:
        tokens += row.request.all_token_ids[start : start + length]
        positions += range(start, start + length)
        adapters += [row.request.adapter] * length
        if start + length == row.request.tokens:
            last.append(len(tokens) - 1)
    parts = [(row.images, start, start + length) for row, start, length in chunks]
    lists = [row.table.page_table() for row, _, _ in chunks]
    pages = torch.zeros(tables, len(chunks), max(map(len, lists)), dtype=torch.int32)
    for place, listed in enumerate(lists):
        pages[:, place, : len(listed)] = torch.tensor(listed, dtype=torch.int32).t()
    return Prompts(
        Chunks(
            to_device(pages, device),
            [start for _, start, _ in chunks],
            [length for _, _, length in chunks],
            to_device([row.slot for row, _, _ in chunks], device),
            two_way_spans(parts),
        ),
        to_device(tokens, device),
        to_device(positions, device),
        to_device(adapters, device),
        to_device(last, device, torch.long),
        to_device([place for place, row in enumerate(finished) for _ in (row, *row.samples)], device, torch.long),
        image_tokens(parts, device),
        rotated_positions(parts, device) if has_axes else None,
    )
