"""What continuous batching keeps of running requests and launched steps, and the tensors of the prompts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hybrid_rlhf.generation.batching.blocks import BlockPool, BlockTable, Match
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.workspace import Fetch, Prompts
from hybrid_rlhf.generation.model.attention import Chunks
from hybrid_rlhf.generation.model.recurrent.states import StateCache
from hybrid_rlhf.generation.transfers import to_device


@dataclass(eq=False)
class LiveRow:
    """A running request."""

    request: Request
    age: int
    """Place in the order of arrival."""
    table: BlockTable
    slot: int
    """Of its states in recurrent layers."""
    computed: int = 0
    """Tokens whose keys and values are in the cache, or will be by the steps that have been launched."""
    stops: tuple[int, ...] = ()
    """Tokens of the prompt after which its states are saved."""
    listed: int = 0
    """Blocks whose pages are in the workspace's table."""
    samples: list[LiveRow] = field(default_factory=list)
    """Other samples of the prompt, which enter with this one."""

    def next_chunk(self, budget: int) -> int:
        """Tokens of the prompt that the next step computes, at most the budget."""
        end = next((stop for stop in self.stops if stop > self.computed), self.request.tokens)
        return min(budget, end - self.computed)

    def new_entries(self, place: int) -> list[tuple[int, int, list[int]]]:
        """Entries of the page table, in the row of that place, for the blocks since the last step."""
        if self.listed == len(self.table.blocks):
            return []
        new = self.table.page_table(self.listed)
        entries = [(place, self.listed + offset, pages) for offset, pages in enumerate(new)]
        self.listed += len(new)
        return entries


class RowStates:
    """The states of live rows in recurrent layers, and those saved of cached prefixes; idle without such layers."""

    def __init__(self, live: StateCache | None, saved: StateCache | None, pool: BlockPool) -> None:
        """Args: states by slot of the rows, and by slot of the pool, which says where saved states are."""
        self._live, self._saved, self._pool = live, saved, pool

    def begin(self, row: LiveRow, match: Match) -> None:
        """Give a row the saved states of the prefix that it begins with."""
        row.stops = match.stops
        if self._live is not None and match.state is not None and row.computed:
            self._live.copy([(match.state, row.slot)], source=self._saved)

    def fork(self, rows: Sequence[LiveRow]) -> None:
        """Give the further samples of rows their states."""
        if self._live is not None:
            self._live.copy([(row.slot, one.slot) for row in rows for one in row.samples])

    def save(self, row: LiveRow) -> None:
        """Keep the states of a row for sequences that begin with its tokens so far, the blocks of which are indexed."""
        if self._saved is None or row.computed > row.request.tokens:  # a token that was computed ahead was not kept
            return
        slot = self._pool.save_state(row.request.all_token_ids[: row.computed], row.request.adapter)
        if slot is not None:
            self._saved.copy([(row.slot, slot)], source=self._live)


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched."""

    rows: list[LiveRow]
    decoding: int
    """Rows that decode; the others enter."""
    fetch: Fetch


@dataclass
class ExpectedLength:
    """Expected length of a completion: tokens sampled per finished completion.

    That is the maximum likelihood of a constant chance to end, with running completions counted as censored; before
    any has finished, half of the limit.
    """

    tokens: float = 0.0
    finished: float = 0.0

    def of(self, limit: int) -> float:
        """The mean for a completion of at most `limit` tokens."""
        return min(limit, (self.tokens + limit / 2) / (self.finished + 1))


@dataclass(frozen=True)
class BatchLoad:
    """How much runs and waits."""

    rows: int = 0
    """Requests that run."""
    waiting: int = 0
    """Requests that wait for rows or memory."""
    used_pages: int = 0
    """Pages of the KV cache that running requests hold."""
    pages: int = 0
    """Pages of the KV cache."""


def prompts_of(
    chunks: Sequence[tuple[LiveRow, int, int]], finished: Sequence[LiveRow], *, tables: int, device: torch.device
) -> Prompts:
    """The prompts of a step as tensors.

    Args:
        chunks: rows, each with the first token and the number of tokens that the step computes of it.
        finished: the rows whose prompts end in this step.
        tables: page tables of the cache.
        device: of the tensors.
    """
    tokens, positions, last, adapters = list[int](), list[int](), list[int](), list[int]()
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
