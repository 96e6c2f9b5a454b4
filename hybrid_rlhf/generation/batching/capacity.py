"""The number of completions decoded together and the size of the KV cache, from free memory.

On a GPU, free memory is what the driver reports after torch's allocator has returned its unused memory, which is most
of the memory after a training step; it cannot return gaps between tensors and memory of CUDA graphs. The memory that
generation needs beside the cache is subtracted. Some of it is measured on the model: the peak of a prefill, and the
peak of a decoding step per row, which counts twice with CUDA graphs, since their pool keeps its memory. vLLM does the
same (`profile_run`). The rest is computed: the tables of the rows, the partial results of split attention, and a
reserve for CUDA graphs. If the cache does not fit nevertheless, a smaller one is tried. On a CPU, half of the free
memory is used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from hybrid_rlhf.generation.batching.images import ENCODED_BYTES
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.sampler import DecodeBatch
from hybrid_rlhf.generation.batching.workspace import Workspace
from hybrid_rlhf.generation.model.attention import Chunks
from hybrid_rlhf.generation.model.cache import CacheLayout, blocks_of
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops.attention import splits_of
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.observability.timers import peak_bytes
from hybrid_rlhf.runtime.world import World

AllocatedT = TypeVar("AllocatedT")
FREE_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Largest share of free memory that generation takes by default."""
_CAPACITY_GRANULE = {"cpu": 1, "cuda": 128}
"""The length of tables is rounded up to a multiple of this number of tokens, so that later rollouts fit in them."""
_MEASURED_ROWS = 64
"""Maximum number of rows in the step whose memory is measured."""
_SAVED_STATES_SHARE = 1 / 16
"""Largest share of the budget that saved states of recurrent layers take."""
_FEW_ROWS = 16
"""Minimum number of rows that saved states are planned for."""
_SHRINKS_TO = 0.9
"""Factor of the cache size after an allocation failed."""
_LEAST_PREFILL_TOKENS = 256
"""Minimum tokens per prefill that are tried after a prefill did not fit."""
GRAPHS_BYTES = 2**28
"""Memory that the driver and cuBLAS take for the CUDA graphs of a workspace. An assumption: not measured."""
_CPU_ROW_LOGITS = 4
"""Number of copies of a row's float32 logits in memory during a step on a CPU."""


@dataclass(frozen=True)
class WorkingMemory:
    """Memory of generation beside the KV cache, in bytes."""

    prefill: float = 0.0
    row: float = 0.0
    """Memory of a decoding step, per row."""
    table: float = 0.0
    """Memory of the tables, per row: uniform numbers, stop tokens, pages, the tokens that a penalty counts."""
    cuda_graphs: bool = False
    """True if CUDA graphs keep their memory in a pool while a prefill runs."""
    reserve: float = 0.0
    """Memory of CUDA graphs beside their pool."""

    def of_rows(self, rows: int) -> float:
        """Peak memory with this number of rows, in bytes."""
        tables = rows * self.table
        step = rows * self.row
        if not self.cuda_graphs:
            return tables + max(self.prefill, step)
        # capturing a graph copies the tables
        return tables + step + max(self.prefill, step + tables) + self.reserve


@dataclass(frozen=True)
class Sequences:
    """Sizes of the sequences that a cache is planned for."""

    layout: CacheLayout
    page_bytes: int
    longest_tokens: int
    """Maximum length of prompt and completion."""
    prompt_tokens: int
    """Length of the longest prompt."""
    rows: int
    """Number of completions that would be decoded together with unlimited memory."""
    prefill_tokens: int
    state_bytes: int = 0
    """Bytes of the states of recurrent layers, per completion."""
    memory_share: float | None = None
    """Largest share of the free memory for the cache, unless one sequence needs more; none: FREE_SHARE alone."""

    @property
    def wanted(self) -> tuple[int, ...]:
        """Numbers of rows and pages that unlimited memory would allow."""
        return self.rows, self.pages(self.rows)

    @property
    def longest_pages(self) -> int:
        """Number of pages of one sequence of the maximum length, plus page 0."""
        return 1 + self.layout.pages_of(self.longest_tokens, computed_together=self.prefill_tokens)

    def pages(self, rows: int) -> int:
        """Number of pages of `rows` sequences of the maximum length, plus page 0."""
        return self.longest_pages + (rows - 1) * self.layout.pages_of(self.longest_tokens)

    def least_pages(self, rows: int) -> int:
        """Minimum number of pages to run `rows` rows: enough for completions of a quarter of the limit. With fewer,
        most rows would wait."""
        typical = self.prompt_tokens + (self.longest_tokens - self.prompt_tokens) // 4
        return max(self.longest_pages, rows * self.layout.pages_of(typical))


def capacity_tokens(needed: int, device: torch.device, max_positions: int | None = None) -> int:
    """Length of the tables in tokens: `needed` rounded up, so that sequences of later calls fit too."""
    granule = _CAPACITY_GRANULE[device.type]
    return min(-(-needed // granule) * granule, max_positions or sys.maxsize)


def rows_and_pages(budget_bytes: float, sequences: Sequences, working: WorkingMemory) -> tuple[int, int]:
    """Return the number of completions decoded together, and the pages of the cache; 0 pages if no sequence fits.

    The number of rows is the largest whose working memory leaves room for `least_pages`. The cache then takes as many
    pages as fit.
    """

    def pages_beside(rows: int) -> int:
        saved = saved_states(budget_bytes, sequences, working, rows) * sequences.state_bytes
        return int((budget_bytes - _beside_cache(sequences, working, rows) - saved) // sequences.page_bytes)

    low, high = 1, sequences.rows
    while low < high:
        middle = (low + high + 1) // 2
        if pages_beside(middle) >= sequences.least_pages(middle):
            low = middle
        else:
            high = middle - 1
    pages = min(pages_beside(low), sequences.pages(low))
    return low, pages if pages >= sequences.longest_pages else 0


def least_bytes(sequences: Sequences, working: WorkingMemory) -> float:
    """Bytes to decode one completion of the maximum length, without saved states."""
    return _beside_cache(sequences, working, 1) + sequences.longest_pages * sequences.page_bytes


def saved_states(budget_bytes: float, sequences: Sequences, working: WorkingMemory, rows: int) -> int:
    """Number of states of recurrent layers that can be saved while `rows` rows run.

    Two per row, one at the end of the prompt and one at the end of the completion, within _SAVED_STATES_SHARE of the
    budget and what one completion leaves of the budget.
    """
    if not sequences.state_bytes:
        return 0
    completion_bytes = sequences.longest_pages * sequences.page_bytes
    room = min(
        _SAVED_STATES_SHARE * budget_bytes, budget_bytes - _beside_cache(sequences, working, rows) - completion_bytes
    )
    return max(0, min(2 * max(rows, _FEW_ROWS), int(room // sequences.state_bytes)))


def _beside_cache(sequences: Sequences, working: WorkingMemory, rows: int) -> float:
    """Bytes of working memory and of the states of the rows."""
    return working.of_rows(rows) + (rows + 1) * sequences.state_bytes


def available_bytes(world: World, share: float | None = None) -> float:
    """Bytes that generation may use on this rank: `share` of the free memory; none: FREE_SHARE."""
    ranks = 1 if world.device.type == "cuda" else world.local_size
    return (FREE_SHARE[world.device.type] if share is None else share) * free_bytes(world.device) / ranks


def free_bytes(device: torch.device) -> int:
    """Free bytes of the host, or of a GPU after torch's allocator has returned its unused memory."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def with_less(allocate: Callable[[int], AllocatedT], pages: int, *, least: int, world: World) -> AllocatedT | None:
    """Call `allocate` with fewer and fewer pages until the result fits in memory on every rank.

    Args:
        allocate: takes a number of pages; raises OutOfMemoryError if they do not fit.
        pages: number tried first; a tenth less is tried after each failure.
        least: minimum number of pages that is tried.
        world: ranks that make this call together and try the same numbers.

    Returns:
        The result of `allocate`; none: no number of pages fitted.
    """
    while pages >= least:
        try:
            allocated = allocate(pages)
        except torch.OutOfMemoryError:
            allocated = None
        fits = world.all_reduce(torch.tensor(int(allocated is not None), device=world.device), dist.ReduceOp.MIN)
        if fits:
            return allocated
        allocated = None
        logger.warning("a KV cache of %d pages does not fit into memory, trying a smaller one", pages)
        pages = int(_SHRINKS_TO * pages)
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def working_memory(
    decoder: Decoder, requests: Sequence[Request], sequences: Sequences, *, cuda_graphs: bool
) -> tuple[WorkingMemory, int]:
    """Return the memory of generation beside the cache, measured on a GPU, estimated on a CPU; and the prompt tokens
    per prefill that fit.

    Args:
        decoder: decoder of the model; all its ranks must make this call.
        requests: requests to generate.
        sequences: their sizes.
        cuda_graphs: decoding steps are captured in CUDA graphs.
    """
    if decoder.world.device.type == "cpu":
        row = 4.0 * _CPU_ROW_LOGITS * decoder.architecture.vocab_size
        return WorkingMemory(row=row), sequences.prefill_tokens
    working, tokens = measured_memory(
        decoder, requests, rows=sequences.rows, prefill_tokens=sequences.prefill_tokens, cuda_graphs=cuda_graphs
    )
    capacity = capacity_tokens(sequences.longest_tokens, decoder.world.device)
    split = split_bytes(decoder, rows=sequences.rows, capacity_tokens=capacity)
    table = table_bytes(decoder, requests, tables=sequences.layout.tables, capacity_tokens=capacity)
    prefill = working.prefill
    if decoder.architecture.banned_ids:  # states of images, those of one prefill and those that are kept
        prefill += tokens * decoder.architecture.hidden_size * decoder.dtype.itemsize + ENCODED_BYTES
    return replace(working, prefill=prefill, row=working.row + split, table=table), tokens


def table_bytes(decoder: Decoder, requests: Sequence[Request], *, tables: int, capacity_tokens: int) -> int:
    """Bytes per row of the tables of a workspace."""
    a = decoder.architecture
    meta = torch.device("meta")
    row = DecodeBatch.empty(1, requests, vocab_size=a.vocab_size, device=meta, has_axes=a.has_axes)
    slot = torch.long.itemsize
    return row.nbytes + slot + tables * blocks_of(capacity_tokens) * torch.int32.itemsize


def split_bytes(decoder: Decoder, *, rows: int, capacity_tokens: int) -> float:
    """Bytes per row of the partial results of split attention with `rows` rows, in the kind of layer that needs
    most."""
    a = decoder.architecture
    heads = len(decoder.split.heads)
    widest = 0
    for kind, kv_heads in enumerate(decoder.split.kv_heads_of):
        splits, _ = splits_of(rows * len(kv_heads), capacity_tokens)
        width = a.kv_size(kind)[1] if a.latent is None else a.latent.size
        widest = max(widest, heads * splits * (width + 2) if splits > 1 else 0)
    return widest * torch.float32.itemsize


def measured_memory(
    decoder: Decoder, requests: Sequence[Request], *, rows: int, prefill_tokens: int, cuda_graphs: bool
) -> tuple[WorkingMemory, int]:
    """Measure working memory by running a prefill, and steps of two sizes, whose difference is the memory of a row.

    Returns as `working_memory`. A prefill that does not fit is halved, except with tensor parallelism, where other
    ranks wait inside it.
    """
    device = decoder.world.device
    longest = max(len(request.prompt) for request in requests)
    while True:
        length = min(longest, prefill_tokens)
        prompts = max(1, min(rows, prefill_tokens // length))
        try:
            workspace = _small_workspace(decoder, requests, rows=1, tokens=length)
            prefill = _peak(device, functools.partial(_read, workspace, prompts, length))
            break
        except torch.OutOfMemoryError:
            if decoder.world.size > 1 or prefill_tokens < 2 * _LEAST_PREFILL_TOKENS:
                raise
            prefill_tokens //= 2
            logger.warning("a prefill does not fit into memory, trying %d prompt tokens at once", prefill_tokens)
    most = min(rows, _MEASURED_ROWS)
    workspace = _small_workspace(decoder, requests, rows=most, tokens=1)
    step = _peak(device, lambda: workspace.step(most))
    smaller = _peak(device, lambda: workspace.step(most // 2)) if most > 1 else 0
    row = max(0.0, (step - smaller) / (most - most // 2))
    reserve = GRAPHS_BYTES if cuda_graphs else 0
    return WorkingMemory(max(prefill, step - most * row), row, cuda_graphs=cuda_graphs, reserve=reserve), prefill_tokens


def _small_workspace(decoder: Decoder, requests: Sequence[Request], *, rows: int, tokens: int) -> Workspace:
    """Return a workspace for a measurement. All its rows share the pages of one sequence, since only memory matters."""
    capacity = capacity_tokens(tokens, decoder.world.device)
    layout = CacheLayout.of(decoder.architecture, decoder.split, capacity)
    cache = decoder.new_cache(layout, pages=1 + layout.pages_of(capacity))
    return Workspace(decoder, requests, cache=cache, rows=rows, capacity_tokens=capacity, cuda_graphs=False)


def _read(workspace: Workspace, prompts: int, length: int) -> None:
    """Run a prefill of `prompts` prompts of `length` tokens."""
    positions = torch.arange(length, device=workspace.decoder.world.device).repeat(prompts)
    pages = workspace.pages.expand(-1, prompts, -1)
    chunks = Chunks(pages, [0] * prompts, [length] * prompts, workspace.slots[:1].repeat(prompts))
    tokens = torch.zeros_like(positions)
    workspace.decoder.hidden(tokens, positions, workspace.attention, states=workspace.states, chunks=chunks)


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """Peak memory of a call, in bytes above what was allocated before. An unmeasured call loads kernels and libraries
    first."""
    with torch.inference_mode():
        run()
        return peak_bytes(device, run)
