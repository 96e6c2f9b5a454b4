"""How many completions are decoded together, and with how large a KV cache: what fits in free memory.

On a GPU, free memory is that of the driver plus what torch's allocator has reserved but does not use, which is most of
the memory after a training step. The temporary memory of generation is subtracted, as measured on the model: the peak
of a prefill, and the peak of a decoding step per row, twice with CUDA graphs, since their pool keeps its memory. vLLM
does the same (`profile_run`). On a CPU half of the free memory is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch

from hybrid_rlhf.generation.batching.cache import CacheLayout
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.workspace import Workspace
from hybrid_rlhf.generation.model.attention import Chunks
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.runtime.observability.timers import peak_bytes
from hybrid_rlhf.runtime.world import World

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
_CPU_ROW_LOGITS = 4
"""Copies of a row's float32 logits that are alive in a step on a CPU."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device, in bytes."""

    free: int
    """Free memory of the driver, or of the host."""
    reserved: int = 0
    """Reserved by torch's allocator."""
    allocated: int = 0
    """In use by tensors, out of the reserved memory."""

    @property
    def available(self) -> int:
        """What tensors can still allocate."""
        return self.free + self.reserved - self.allocated


@dataclass(frozen=True)
class WorkingMemory:
    """Temporary memory of generation beside the KV cache, in bytes."""

    prefill: float = 0.0
    row: float = 0.0
    """Of a decoding step, per row."""
    cuda_graphs: bool = False
    """Whether CUDA graphs keep their memory in a pool while a prefill runs."""


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
    places: int = 1
    """Tokens that a row computes in a step, at most: one, and those of a draft."""

    @property
    def wanted(self) -> tuple[int, ...]:
        """Rows and pages that unlimited memory would allow, and places of a row in a step."""
        return self.rows, self.pages(self.rows), self.places

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
    """Temporary memory, and the states of the rows."""
    temporary = max(working.prefill, rows * working.row) + (rows * working.row if working.cuda_graphs else 0.0)
    return temporary + (rows + 1) * sequences.state_bytes


def available_bytes(world: World, share: float | None = None) -> float:
    """Memory that generation may take on this rank; `share`: of the free memory, none: FREE_SHARE."""
    memory = device_memory(world.device)
    ranks = 1 if world.device.type == "cuda" else world.local_size
    return (FREE_SHARE[world.device.type] if share is None else share) * memory.available / ranks


def device_memory(device: torch.device) -> DeviceMemory:
    """Memory of a GPU, or of the host."""
    if device.type == "cpu":
        return DeviceMemory(psutil.virtual_memory().available)
    return DeviceMemory(
        torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    )


def working_memory(
    decoder: Decoder, requests: Sequence[Request], *, rows: int, prefill_tokens: int, cuda_graphs: bool
) -> WorkingMemory:
    """Temporary memory of generating requests: measured on a GPU, estimated on a CPU.

    Args:
        decoder: of the model; all its ranks must call.
        requests: what will be generated.
        rows: most completions decoded together.
        prefill_tokens: most prompt tokens of one prefill.
        cuda_graphs: whether decoding steps are captured in CUDA graphs.
    """
    if decoder.world.device.type == "cpu":
        return WorkingMemory(row=4.0 * _CPU_ROW_LOGITS * decoder.architecture.vocab_size)
    return measured_memory(decoder, requests, rows=rows, prefill_tokens=prefill_tokens, cuda_graphs=cuda_graphs)


def measured_memory(
    decoder: Decoder, requests: Sequence[Request], *, rows: int, prefill_tokens: int, cuda_graphs: bool
) -> WorkingMemory:
    """As `working_memory`, by running a prefill and two sizes of step, whose difference is the memory of a row."""
    device = decoder.world.device
    length = min(max(len(request.prompt) for request in requests), prefill_tokens)
    prompts = max(1, min(rows, prefill_tokens // length))
    workspace = _small_workspace(decoder, requests, rows=1, tokens=length)
    prefill = _peak(device, lambda: _read(workspace, prompts, length))
    most = min(rows, _MEASURED_ROWS)
    workspace = _small_workspace(decoder, requests, rows=most, tokens=1)
    step = _peak(device, lambda: workspace.step(most))
    smaller = _peak(device, lambda: workspace.step(most // 2)) if most > 1 else 0
    row = max(0.0, (step - smaller) / (most - most // 2))
    return WorkingMemory(prefill=max(prefill, step - most * row), row=row, cuda_graphs=cuda_graphs)


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
