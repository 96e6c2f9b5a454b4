"""Training states out of the way while the actor generates: optimizer states, master weights and gradient buffers.

Why our own for the optimizer: DeepSpeed moves the states of its FusedAdam only (under ZeRO-3), and leaves its copies
in the optimizer's state, where a checkpoint would save them. Master weights of ZeRO 1 and 2 and gradient buffers go
through DeepSpeed, which knows what points into them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor

_GRADIENTS = (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer)


class HostStates:
    """Moves an engine's training states to host memory and back; the host memory is kept for the next time."""

    def __init__(self, engine: DeepSpeedEngine, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self._stage = int(engine.zero_optimization_stage())
        self._buffers: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def moved(self) -> Iterator[None]:
        """Between two updates: states on the host inside, where they were after, bit for bit."""
        tensors = [tensor for tensor in self._tensors() if tensor.device.type == self._device.type]
        for tensor in tensors:
            buffer = self._buffer(tensor)
            buffer.copy_(tensor)
            tensor.data = buffer
        through_deepspeed = self._through_deepspeed()
        if through_deepspeed:
            self._engine.offload_states(include=through_deepspeed, pin_memory=self._device.type == "cuda")
        try:
            yield
        finally:
            for tensor in tensors:
                tensor.data = tensor.to(self._device, copy=True)
            if through_deepspeed:
                self._engine.reload_states()

    def _tensors(self) -> Iterator[Tensor]:
        optimizer: Any = self._engine.optimizer
        for states in getattr(optimizer, "optimizer", optimizer).state.values():
            yield from (value for value in states.values() if isinstance(value, Tensor) and value.dim())
        if self._stage == 3:
            yield from optimizer.fp32_partitioned_groups_flat

    def _through_deepspeed(self) -> tuple[OffloadStateTypeEnum, ...]:
        if self._stage == 0:
            return ()
        return _GRADIENTS if self._stage == 3 else (OffloadStateTypeEnum.hp_params, *_GRADIENTS)

    def _buffer(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._buffers:
            self._buffers[id(tensor)] = torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")
        return self._buffers[id(tensor)]
