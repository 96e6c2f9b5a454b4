"""Offload to host memory: an engine's training states while the actor generates, a frozen model's weights while idle.

Why not DeepSpeed for optimizer states: it moves only those of its FusedAdam (under ZeRO-3), and leaves copies in the
optimizer's state, where a checkpoint would save them. Master weights of ZeRO 1 and 2 and gradient buffers are moved by
DeepSpeed, which knows their views.

OffloadedWeights is for frozen models that are not partitioned; ZeRO-3 has its own offload (zero.offload_parameters).

rules.py decides when something moves. A GPU computes at the same time: states return while the roles score, and a layer
of a frozen model computes while the weights of the next ones arrive.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from hybrid_rlhf.engines.deepspeed_internals import (
    copied_to_host,
    forget_fragments,
    has_whole_gradients,
    master_partitions,
    use_host_buffers,
    wrapped_optimizer,
)

_GRADIENTS = (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer)
_PAGE = 4096


def host_buffers(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Uninitialised tensors in host memory with the shapes, strides and dtypes of others, in one block of memory.

    For a GPU the block is pinned as a whole: torch's allocator of pinned memory rounds each tensor up to a power of
    two, in the mean to 1.4 times its size.
    """
    sizes = [-(-tensor.nbytes // 64) * 64 for tensor in tensors]
    pages = -(-sum(sizes) // _PAGE)
    memory = torch.empty((pages + 1) * _PAGE, dtype=torch.uint8)
    block = memory[-memory.data_ptr() % _PAGE :][: pages * _PAGE]
    if device.type == "cuda" and pages:
        _pin(block)
    buffers = []
    for tensor, part in zip(tensors, block[: sum(sizes)].split(sizes), strict=True):
        form = torch.empty_like(tensor, device="meta")
        buffers.append(part.view(tensor.dtype).as_strided(form.shape, form.stride()))
    return buffers


def _pin(block: Tensor) -> None:
    """Lock the pages of a block in memory as long as it exists, for asynchronous copies."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0))
    weakref.finalize(block.untyped_storage(), runtime.cudaHostUnregister, block.data_ptr()).atexit = False


class CopyStream:
    """Copies from the host to a GPU, asynchronously to its computation; on a CPU, copies are immediate."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start a copy into memory that was just allocated. The target must not be read before `wait`."""
        if self._stream is None:
            target.copy_(source)
            return
        # the allocator may have returned memory that earlier work on the GPU still reads
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """Record an event after the copies started so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Make later work of the GPU wait for the copies before a mark."""
        if mark is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)  # type: ignore[union-attr]


class OffloadedStates:
    """Moves an engine's training states to host memory and back. Host buffers are reused."""

    def __init__(self, engine: DeepSpeedEngine, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._copies: CopyStream | None = None
        self._mark: torch.cuda.Event | None = None
        self._stage = int(engine.zero_optimization_stage())
        self._buffers: dict[str, list[Tensor]] = {}

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Context, between two updates, in which the states are on the host. At its end their copies back, bit for bit,
        start; `wait` waits for them."""
        self.wait()
        forget_fragments(self._engine)
        tensors = [tensor for tensor in self._tensors() if tensor.device.type == self._device.type]
        for tensor, buffer in zip(tensors, self._buffers_for("states", tensors), strict=True):
            buffer.copy_(tensor)
            tensor.data = buffer
        through_deepspeed = self._through_deepspeed()
        if through_deepspeed:
            pins = self._device.type == "cuda"
            if pins:
                use_host_buffers(self._engine, self._buffers_for("DeepSpeed's", copied_to_host(self._engine)))
            self._engine.offload_states(include=through_deepspeed, pin_memory=pins)
        try:
            yield
        finally:
            copies = self._copies = self._copies or CopyStream(self._device)
            for tensor in tensors:
                target = torch.empty_like(tensor, device=self._device)
                host = tensor.data
                copies.copy(target, host)
                tensor.data = target
            self._mark = copies.mark()
            if through_deepspeed:
                self._engine.reload_states()

    def wait(self) -> None:
        """Make later work wait until the states have returned. Must be called before they are read or written."""
        if self._copies is not None:
            self._copies.wait(self._mark)

    def _tensors(self) -> Iterator[Tensor]:
        for states in wrapped_optimizer(self._engine).state.values():
            yield from (value for value in states.values() if isinstance(value, Tensor) and value.dim())
        if self._stage == 3 or has_whole_gradients(self._engine):
            yield from master_partitions(self._engine)

    def _through_deepspeed(self) -> tuple[OffloadStateTypeEnum, ...]:
        if self._stage == 0 or has_whole_gradients(self._engine):
            return ()
        return _GRADIENTS if self._stage == 3 else (OffloadStateTypeEnum.hp_params, *_GRADIENTS)

    def _buffers_for(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of earlier calls, if the tensors are the same in number, shapes and dtypes."""
        forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if [(buffer.shape, buffer.dtype) for buffer in self._buffers.get(name, [])] != forms:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # copies out of the old ones
            self._buffers.pop(name, None)
            self._buffers[name] = host_buffers(tensors, self._device)
        return self._buffers.get(name, [])  # an optimizer has no states before its first update


class OffloadedWeights:
    """Keeps a frozen module's weights on the host, except inside `on_device`."""

    def __init__(self, module: nn.Module, device: torch.device, *, layers: Iterable[nn.Module] = ()) -> None:
        """Move the weights to the host.

        Args:
            module: frozen and not partitioned; later changes of its weights must be in place.
            device: device on which it computes.
            layers: submodules that are called in this order; the weights outside them are needed from the beginning.
        """
        self._device = device
        self._copies = CopyStream(device)
        self._layers = [(layer, list(layer.parameters())) for layer in layers]
        in_layers = {id(parameter) for _, parameters in self._layers for parameter in parameters}
        self._outside = [parameter for parameter in module.parameters() if id(parameter) not in in_layers]
        self._parameters = [*self._outside, *(parameter for _, parameters in self._layers for parameter in parameters)]
        weights = [parameter.data for parameter in self._parameters]
        for parameter, host in zip(self._parameters, host_buffers(weights, device), strict=True):
            parameter.data = host.copy_(parameter.data)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which the weights are on the device. Each layer waits for its own weights."""
        host_tensors = [parameter.data for parameter in self._parameters]
        self._fetch(self._outside)
        outside = self._copies.mark()
        handles = []
        for layer, parameters in self._layers:
            self._fetch(parameters)
            handles.append(layer.register_forward_pre_hook(partial(self._arrived, self._copies.mark())))
        last = self._copies.mark()
        self._copies.wait(outside)
        try:
            yield
        finally:
            self._copies.wait(last)  # also for layers that were not called, before their memory is freed
            for handle in handles:
                handle.remove()
            for parameter, host in zip(self._parameters, host_tensors, strict=True):
                parameter.data = host

    def _fetch(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            target = torch.empty_like(parameter, device=self._device, requires_grad=False)
            self._copies.copy(target, parameter.data)
            parameter.data = target

    def _arrived(self, mark: torch.cuda.Event | None, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of a layer: wait for its weights."""
        self._copies.wait(mark)
