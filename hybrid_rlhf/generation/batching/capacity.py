"""How many completions are decoded together, and with how large a KV cache: what fits in free memory.

On a GPU, free memory is that of the driver after torch's allocator has returned what it holds without using it, which
is most of the memory after a training step; what it cannot return lies between tensors or belongs to CUDA graphs. The
memory of generation beside the cache is subtracted. Measured on the model: the peak of a prefill, and the peak of a
decoding step per row, twice with CUDA graphs, since their pool keeps its memory. vLLM does the same (`profile_run`).
Computed: the tables of the rows, the parts of split attention, and a reserve for CUDA graphs. Should the cache not fit
nevertheless, it is made smaller. On a CPU half of the free memory is used.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from hybrid_rlhf.generation.batching.decode_batch import DecodeBatch
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.workspace import Workspace
from hybrid_rlhf.generation.model.attention import Chunks
from hybrid_rlhf.generation.model.cache import CacheLayout, blocks_of
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops.attention import splits_of
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.observability.timers import peak_bytes
from hybrid_rlhf.runtime.world import World

logger = logging.getLogger(LOGGER_NAME)
AllocatedT = TypeVar("AllocatedT")
FREE_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Largest share of free memory that generation takes by default."""
_CAPACITY_GRANULE = {"cpu": 1, "cuda": 128}
"""Tables have columns for a multiple of so many tokens, so that later rollouts fit in them."""
_MEASURED_ROWS = 64
"""Most rows of the step whose memory is measured."""
_SAVED_STATES_SHARE = 1 / 16
"""Largest share of the budget that saved states of recurrent layers take."""
_FEW_ROWS = 16
"""Rows for which states are saved at least."""
_SHRINKS_TO = 0.9
"""Share of a cache that is tried after the cache did not fit."""
_LEAST_PREFILL_TOKENS = 256
"""Fewest tokens of a prefill that is tried after one did not fit."""
GRAPHS_BYTES = 2**28
"""Memory that the driver and cuBLAS take for the CUDA graphs of a workspace. An assumption: not measured."""
_CPU_ROW_LOGITS = 4
"""Copies of a row's float32 logits that are alive in a step on a CPU."""


@dataclass(frozen=True)
class WorkingMemory:
    """Memory of generation beside the KV cache, in bytes."""

    prefill: float = 0.0
    row: float = 0.0
    """Of a decoding step, per row."""
    table: float = 0.0
    """Of the tables, per row: uniform numbers, stop tokens, pages, the tokens that a penalty counts."""
    cuda_graphs: bool = False
    """Whether CUDA graphs keep their memory in a pool while a prefill runs."""
    reserve: float = 0.0
    """For CUDA graphs, besides their pool."""

    def of_rows(self, rows: int) -> float:
        """Largest memory at once with so many rows."""
        tables, step = rows * self.table, rows * self.row
        if not self.cuda_graphs:
            return tables + max(self.prefill, step)
        # a capture copies the tables
        return tables + step + max(self.prefill, step + tables) + self.reserve


@dataclass(frozen=True)
class Sequences:
    """What a cache is for."""

    layout: CacheLayout
    page_bytes: int
    longest_tokens: int
    """Prompt and completion, at most."""
    prompt_tokens: int
    """Longest prompt."""
    rows: int
    """Completions that would be decoded together with unlimited memory."""
    prefill_tokens: int
    state_bytes: int = 0
    """Of recurrent layers, per completion."""
    memory_share: float | None = None
    """Largest share of the free memory for the cache, unless one sequence needs more; none: FREE_SHARE alone."""

    @property
    def wanted(self) -> tuple[int, ...]:
        """Rows and pages that unlimited memory would allow."""
        return self.rows, self.pages(self.rows)

    @property
    def longest_pages(self) -> int:
        """Pages of one sequence of the maximum length, and page 0."""
        return 1 + self.layout.pages_of(self.longest_tokens, computed_together=self.prefill_tokens)

    def pages(self, rows: int) -> int:
        """Pages of so many sequences of the maximum length."""
        return self.longest_pages + (rows - 1) * self.layout.pages_of(self.longest_tokens)

    def least_pages(self, rows: int) -> int:
        """Pages without which so many rows would mostly wait: completions of a quarter of their limit."""
        typical = self.prompt_tokens + (self.longest_tokens - self.prompt_tokens) // 4
        return max(self.longest_pages, rows * self.layout.pages_of(typical))


def capacity_tokens(needed: int, device: torch.device, max_positions: int | None = None) -> int:
    """Longest sequence that tables have columns for, so that those of later calls fit too."""
    granule = _CAPACITY_GRANULE[device.type]
    return min(-(-needed // granule) * granule, max_positions or sys.maxsize)


def rows_and_pages(budget_bytes: float, sequences: Sequences, working: WorkingMemory) -> tuple[int, int]:
    """How many completions are decoded together, and the pages of the cache; 0 pages if not one sequence fits.

    The most rows for which their temporary memory leaves room for `least_pages`; then as many pages as fit.
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
    """Memory of one completion of the maximum length, without saved states."""
    return _beside_cache(sequences, working, 1) + sequences.longest_pages * sequences.page_bytes


def saved_states(budget_bytes: float, sequences: Sequences, working: WorkingMemory, rows: int) -> int:
    """How many states of recurrent layers are saved beside so many rows.

    Two each, of the prompt and the end, within their share of the budget and what one completion leaves of it.
    """
    if not sequences.state_bytes:
        return 0
    one = sequences.longest_pages * sequences.page_bytes
    room = min(_SAVED_STATES_SHARE * budget_bytes, budget_bytes - _beside_cache(sequences, working, rows) - one)
    return max(0, min(2 * max(rows, _FEW_ROWS), int(room // sequences.state_bytes)))


def _beside_cache(sequences: Sequences, working: WorkingMemory, rows: int) -> float:
    """Working memory, and the states of the rows."""
    return working.of_rows(rows) + (rows + 1) * sequences.state_bytes


def available_bytes(world: World, share: float | None = None) -> float:
    """Memory that generation may take on this rank; `share`: of the free memory, none: FREE_SHARE."""
    ranks = 1 if world.device.type == "cuda" else world.local_size
    return (FREE_SHARE[world.device.type] if share is None else share) * free_bytes(world.device) / ranks


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, after torch's allocator has returned what it does not use; or of the host."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def with_less(allocate: Callable[[int], AllocatedT], pages: int, *, least: int, world: World) -> AllocatedT | None:
    """What `allocate` makes of the most pages, up to so many, for which every rank has memory.

    Args:
        allocate: raises OutOfMemoryError where there is none.
        pages: tried first, then a tenth less after each failure.
        least: fewest pages that are of use.
        world: its ranks call together, and try the same numbers.

    Returns:
        none: even the fewest that were tried did not fit.
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
    """Memory of generating requests beside the cache: measured on a GPU, estimated on a CPU; and the prompt tokens of
    a prefill that fits.

    Args:
        decoder: of the model; all its ranks must call.
        requests: what will be generated.
        sequences: of the requests.
        cuda_graphs: whether decoding steps are captured in CUDA graphs.
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
    return replace(working, row=working.row + split, table=table), tokens


def table_bytes(decoder: Decoder, requests: Sequence[Request], *, tables: int, capacity_tokens: int) -> int:
    """Bytes of a row in the tables of a workspace."""
    row = DecodeBatch.empty(1, requests, vocab_size=decoder.architecture.vocab_size, device=torch.device("meta"))
    slot = torch.long.itemsize
    return row.nbytes + slot + tables * blocks_of(capacity_tokens) * torch.int32.itemsize


def split_bytes(decoder: Decoder, *, rows: int, capacity_tokens: int) -> float:
    """Bytes of a row for the parts of split attention, of the widest kind of layer, with so many rows."""
    a, heads = decoder.architecture, len(decoder.split.heads)
    widest = 0
    for kind, kv_heads in enumerate(decoder.split.kv_heads_of):
        splits, _ = splits_of(rows * len(kv_heads), capacity_tokens)
        width = a.kv_size(kind)[1] if a.latent is None else a.latent.size
        widest = max(widest, heads * splits * (width + 2) if splits > 1 else 0)
    return widest * torch.float32.itemsize


def measured_memory(
    decoder: Decoder, requests: Sequence[Request], *, rows: int, prefill_tokens: int, cuda_graphs: bool
) -> tuple[WorkingMemory, int]:
    """As `working_memory`, by running a prefill and two sizes of step, whose difference is the memory of a row.

    A prefill that does not fit is halved; not with tensor parallelism, where other ranks wait inside of it.
    """
    device, longest = decoder.world.device, max(len(request.prompt) for request in requests)
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
    """A workspace for a measurement; all its rows share the pages of one sequence, as only memory matters."""
    capacity = capacity_tokens(tokens, decoder.world.device)
    layout = CacheLayout.of(decoder.architecture, decoder.split, capacity)
    cache = decoder.new_cache(layout, pages=1 + layout.pages_of(capacity))
    return Workspace(decoder, requests, cache=cache, rows=rows, capacity_tokens=capacity, cuda_graphs=False)


def _read(workspace: Workspace, prompts: int, length: int) -> None:
    """Run a prefill of `prompts` prompts of `length` tokens."""
    positions = torch.arange(length, device=workspace.decoder.world.device).repeat(prompts)
    pages = workspace.pages.expand(-1, prompts, -1)
    chunks = Chunks(pages, [0] * prompts, [length] * prompts, workspace.slots[:1].expand(prompts))
    states = None if workspace.states is None else workspace.states.step(None, chunks)
    attend = workspace.attention.step(None, chunks)
    workspace.decoder.hidden(torch.zeros_like(positions), positions, attend, states=states)


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """Peak memory of a call, in bytes above what was allocated before; a first call loads kernels and libraries."""
    with torch.inference_mode():
        run()
        return peak_bytes(device, run)
