"""How many completions are decoded together: as many KV slots as fit in free memory.

On a GPU, free memory is that of the driver plus what torch's allocator has reserved but does not use, which is most of
the memory after a training step. The temporary memory of generation is subtracted, as measured on the model: the peak
of a prefill, and the peak of a decoding step per row, twice with CUDA graphs, since their pool keeps its memory. vLLM
does the same (`profile_run`). On a CPU half of the free memory is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch

from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.workspace import Workspace
from hybrid_rlhf.generation.model.attention import Span
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.runtime.observability.timers import peak_bytes
from hybrid_rlhf.runtime.world import World

FREE_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Largest share of free memory that generation takes by default."""
_CAPACITY_GRANULE = {"cpu": 1, "cuda": 128}
"""Slot capacities are rounded up to a multiple of it, so that later rollouts fit in the same slots."""
_MEASURED_ROWS = 64
"""Most rows of the step whose memory is measured."""
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


def slot_tokens(needed: int, device: torch.device) -> int:
    """Capacity of a slot, in tokens, for sequences of up to `needed` tokens."""
    granule = _CAPACITY_GRANULE[device.type]
    return -(-needed // granule) * granule


def slots_within(budget_bytes: float, slot_bytes: float, working: WorkingMemory) -> int:
    """The most slots s for which s * slot + max(prefill, s * row), plus s * row with CUDA graphs, fit in a budget."""
    pool = working.row if working.cuda_graphs else 0.0
    beside_prefill = (budget_bytes - working.prefill) // (slot_bytes + pool)
    beside_step = budget_bytes // (slot_bytes + pool + working.row)
    return max(0, int(min(beside_prefill, beside_step)))


def available_bytes(world: World) -> float:
    """Memory that generation may take on this rank."""
    memory = device_memory(world.device)
    ranks = 1 if world.device.type == "cuda" else world.local_size
    return FREE_SHARE[world.device.type] * memory.available / ranks


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
    workspace = _small_workspace(decoder, requests, slots=prompts, tokens=length)
    prefill = _peak(device, lambda: _read(workspace, prompts, length))
    most = min(rows, _MEASURED_ROWS)
    workspace = _small_workspace(decoder, requests, slots=most, tokens=1)
    step = _peak(device, lambda: workspace.step(most))
    smaller = _peak(device, lambda: workspace.step(most // 2)) if most > 1 else 0
    row = max(0.0, (step - smaller) / (most - most // 2))
    return WorkingMemory(prefill=max(prefill, step - most * row), row=row, cuda_graphs=cuda_graphs)


def _small_workspace(decoder: Decoder, requests: Sequence[Request], *, slots: int, tokens: int) -> Workspace:
    """A workspace for a measurement."""
    capacity = slot_tokens(tokens, decoder.world.device)
    return Workspace(decoder, requests, slots=slots, wanted_slots=slots, capacity_tokens=capacity, cuda_graphs=False)


def _read(workspace: Workspace, slots: int, length: int) -> None:
    """Run a prefill of `slots` prompts of `length` tokens."""
    device = workspace.decoder.world.device
    positions = torch.arange(length, device=device).repeat(slots)
    attend = workspace.attention.prefill([Span(range(slots), 0, length)])
    workspace.decoder.hidden(torch.zeros_like(positions), positions, attend)


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """Peak memory of a call, in bytes above what was allocated before; a first call loads kernels and libraries."""
    with torch.inference_mode():
        run()
        return peak_bytes(device, run)
