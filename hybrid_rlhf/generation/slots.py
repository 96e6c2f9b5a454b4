"""How many completions are decoded at once: as many slots as memory has room for beside everything else.

On a GPU what is free is what the driver has, and what torch's allocator holds without using it: after a training step
that is most of the memory. From it goes what generation itself takes for the moment, measured on the model: the peak of
a prefill, and of a decoding step for each row, twice where steps are captured, as their pool keeps its memory. So does
vLLM (`profile_run`). On a CPU half of the free memory is left to everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch

from hybrid_rlhf.generation.attention import Span
from hybrid_rlhf.generation.decoder import Decoder
from hybrid_rlhf.generation.requests import Request
from hybrid_rlhf.generation.workspace import Workspace
from hybrid_rlhf.runtime.timers import peak_bytes
from hybrid_rlhf.runtime.world import World

FREE_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Of the memory that is free, what generation takes at most unless told."""
_CAPACITY_GRANULE = {"cpu": 1, "cuda": 128}
"""Slots are rounded up to it, so that the next rollout finds room in the same ones."""
_MEASURED_ROWS = 64
"""Rows of the step whose memory is measured, at most."""
_CPU_ROW_LOGITS = 4
"""Copies of a row's float32 logits in a step, on a CPU."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device."""

    free: int
    """Of the driver, or of the host."""
    reserved: int = 0
    """Held by torch's allocator."""
    allocated: int = 0
    """Of these, in use."""

    @property
    def available(self) -> int:
        """What tensors can still take."""
        return self.free + self.reserved - self.allocated


@dataclass(frozen=True)
class Working:
    """Bytes that generation takes for the moment, beside the cache."""

    prefill: float = 0.0
    row: float = 0.0
    """Of a decoding step, for each row."""
    captured: bool = False
    """Whether captured steps keep theirs in a pool while a prefill runs."""


def slot_tokens(needed: int, device: torch.device) -> int:
    """Tokens of a slot for sequences of up to so many."""
    granule = _CAPACITY_GRANULE[device.type]
    return -(-needed // granule) * granule


def slots_within(budget_bytes: float, slot_bytes: float, working: Working) -> int:
    """The most slots s with s * slot + max(prefill, s * row) in a budget, and s * row more where steps are captured."""
    pool = working.row if working.captured else 0.0
    beside_prefill = (budget_bytes - working.prefill) // (slot_bytes + pool)
    beside_step = budget_bytes // (slot_bytes + pool + working.row)
    return max(0, int(min(beside_prefill, beside_step)))


def available_bytes(world: World) -> float:
    """What generation may take on this rank."""
    memory = device_memory(world.device)
    ranks = 1 if world.device.type == "cuda" else world.local_size
    return FREE_SHARE[world.device.type] * memory.available / ranks


def device_memory(device: torch.device) -> DeviceMemory:
    """Of a GPU, or of the host."""
    if device.type == "cpu":
        return DeviceMemory(psutil.virtual_memory().available)
    return DeviceMemory(
        torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    )


def working_memory(
    decoder: Decoder, requests: Sequence[Request], *, rows: int, prefill_tokens: int, captures: bool
) -> Working:
    """What generation of requests takes for the moment: measured on a GPU, estimated on a CPU.

    Args:
        decoder: computes; all its ranks call.
        requests: what will be asked.
        rows: at once, at most.
        prefill_tokens: read at once, at most.
        captures: whether steps are captured.
    """
    if decoder.world.device.type == "cpu":
        return Working(row=4.0 * _CPU_ROW_LOGITS * decoder.architecture.vocab_size)
    return measured_memory(decoder, requests, rows=rows, prefill_tokens=prefill_tokens, captures=captures)


def measured_memory(
    decoder: Decoder, requests: Sequence[Request], *, rows: int, prefill_tokens: int, captures: bool
) -> Working:
    """As `working_memory`, by running a prefill, and steps of two sizes: what both take is no row's."""
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
    return Working(prefill=max(prefill, step - most * row), row=row, captured=captures)


def _small_workspace(decoder: Decoder, requests: Sequence[Request], *, slots: int, tokens: int) -> Workspace:
    """For so many rows of a few tokens."""
    capacity = slot_tokens(tokens, decoder.world.device)
    return Workspace(
        decoder, requests, slots=slots, wanted_slots=slots, capacity_tokens=capacity, captures=False
    )  # fmt: skip


def _read(workspace: Workspace, slots: int, length: int) -> None:
    """A prefill of so many prompts of a length."""
    device = workspace.decoder.world.device
    positions = torch.arange(length, device=device).repeat(slots)
    attend = workspace.attention.prefill([Span(range(slots), 0, length)])
    workspace.decoder.hidden(torch.zeros_like(positions), positions, attend)


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that a call takes beyond what there is before; the first call loads kernels and libraries."""
    with torch.inference_mode():
        run()
        return peak_bytes(device, run)
