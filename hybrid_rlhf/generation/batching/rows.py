"""Records of continuous batching for running requests and launched steps, and the prompt tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hybrid_rlhf.generation.batching.blocks import BlockPool, BlockTable, Match
from hybrid_rlhf.generation.batching.requests import NewTokens, Request
from hybrid_rlhf.generation.batching.workspace import Fetch, Prompts
from hybrid_rlhf.generation.model.attention import Chunks
from hybrid_rlhf.generation.model.recurrent.states import StateCache
from hybrid_rlhf.generation.transfers import to_device


@dataclass(eq=False)
class LiveRow:
    """A running request."""

    request: Request
    age: int
    """Index in the order of arrival."""
    table: BlockTable
    slot: int
    """Slot of its states in recurrent layers."""
    computed: int = 0
    """Number of tokens whose keys and values are in the cache, including those of launched steps."""
    stops: tuple[int, ...] = ()
    """Numbers of prompt tokens after which the states are saved."""
    listed: int = 0
    """Number of blocks whose pages are in the workspace's page table."""
    samples: list[LiveRow] = field(default_factory=list)
    """Further samples of the prompt, which enter together with this one."""

    def next_chunk(self, budget: int) -> int:
        """Number of prompt tokens that the next step computes, at most `budget`."""
        end = next((stop for stop in self.stops if stop > self.computed), self.request.tokens)
        return min(budget, end - self.computed)

    def new_entries(self, place: int) -> list[tuple[int, int, list[int]]]:
        """Return (row, block, pages) for the blocks since the last step, where `place` is the row of the page table."""
        if self.listed == len(self.table.blocks):
            return []
        new = self.table.page_table(self.listed)
        entries = [(place, self.listed + offset, pages) for offset, pages in enumerate(new)]
        self.listed += len(new)
        return entries


class RowStates:
    """States of live rows in recurrent layers, and saved states of cached prefixes. Does nothing without such
    layers."""

    def __init__(self, live: StateCache | None, saved: StateCache | None, pool: BlockPool) -> None:
        """Args: states of live rows by their slots, saved states by the slots of the pool, and the pool."""
        self._live = live
        self._saved = saved
        self._pool = pool

    def begin(self, row: LiveRow, match: Match) -> None:
        """Copy the saved states of a matched prefix to a row."""
        row.stops = match.stops
        if self._live is not None and match.state is not None and row.computed:
            self._live.copy([(match.state, row.slot)], source=self._saved)

    def fork(self, rows: Sequence[LiveRow]) -> None:
        """Copy the states of rows to their further samples."""
        if self._live is not None:
            self._live.copy([(row.slot, sample.slot) for row in rows for sample in row.samples])

    def save(self, row: LiveRow) -> None:
        """Save the states of a row for later sequences with the same prefix. The blocks of its tokens must be
        indexed."""
        discarded = row.computed > row.request.tokens  # the states include a token that was dropped
        if self._saved is None or discarded or row.table.outdated:
            return
        slot = self._pool.save_state(row.request.all_token_ids[: row.computed], row.request.adapter)
        if slot is not None:
            self._saved.copy([(row.slot, slot)], source=self._live)


@dataclass
class LaunchedStep:
    """A step that was launched and whose rows are still in the batch."""

    rows: list[LiveRow]
    decoding: int
    """Number of rows that decode; the rows after them enter."""
    fetch: Fetch
    new: NewTokens | None = None
    """Its tokens, once they are fetched."""


@dataclass
class ExpectedLength:
    """Expected length of a completion: sampled tokens per finished completion.

    This is the maximum likelihood estimate for a constant probability to end at each token, with running completions
    as censored observations. Before any completion has finished, it is half of the limit.
    """

    tokens: float = 0.0
    finished: float = 0.0

    def of(self, limit: int) -> float:
        """Expected number of tokens of a completion that is limited to `limit` tokens."""
        return min(limit, (self.tokens + limit / 2) / (self.finished + 1))


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


def prompts_of(
    chunks: Sequence[tuple[LiveRow, int, int]], finished: Sequence[LiveRow], *, tables: int, device: torch.device
) -> Prompts:
    """Return the prompts of a step as tensors.

    Args:
        chunks: (row, first token, number of tokens) of each chunk that the step computes.
        finished: rows whose prompts end in this step.
        tables: number of page tables of the cache.
        device: device of the tensors.
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
        ),
        to_device(tokens, device),
        to_device(positions, device),
        to_device(adapters, device),
        to_device(last, device, torch.long),
        to_device([place for place, row in enumerate(finished) for _ in (row, *row.samples)], device, torch.long),
    )
