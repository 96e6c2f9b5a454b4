"""Offload to host memory: an engine's training states while the actor generates, a frozen model's weights while idle.

Why not DeepSpeed for the optimizer's states: it moves only those of its FusedAdam (under ZeRO-3), and leaves copies in
the optimizer's state, where a checkpoint would save them. Master weights of ZeRO 1 and 2 and gradient buffers are moved
by DeepSpeed, which knows the views of them.

OffloadedWeights is for frozen models that are not partitioned; ZeRO-3 has its own offload (zero.offload_parameters).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from hybrid_rlhf.engines.deepspeed_internals import wrapped_optimizer, zero3_master_weights

_GRADIENTS = (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer)


class OffloadedStates:
    """Moves an engine's training states to host memory and back; the host buffers are kept for reuse."""

    def __init__(self, engine: DeepSpeedEngine, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self._stage = int(engine.zero_optimization_stage())
        self._buffers: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Between two updates: the states are on the host inside, and restored bit for bit at the end."""
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
        for states in wrapped_optimizer(self._engine).state.values():
            yield from (value for value in states.values() if isinstance(value, Tensor) and value.dim())
        if self._stage == 3:
            yield from zero3_master_weights(self._engine)

    def _through_deepspeed(self) -> tuple[OffloadStateTypeEnum, ...]:
        if self._stage == 0:
            return ()
        return _GRADIENTS if self._stage == 3 else (OffloadStateTypeEnum.hp_params, *_GRADIENTS)

    def _buffer(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._buffers:
            self._buffers[id(tensor)] = torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")
        return self._buffers[id(tensor)]


class OffloadedWeights:
    """Keeps a frozen module's weights on the host, except where it computes."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Move the weights.

        Args:
            module: frozen and not partitioned; later changes of its weights must be in place.
            device: where it computes.
        """
        self._device = device
        self._parameters = list(module.parameters())
        for parameter in self._parameters:
            host = torch.empty_like(parameter, device="cpu", pin_memory=device.type == "cuda", requires_grad=False)
            parameter.data = host.copy_(parameter.data)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Hold the weights on the device, so that the module can compute."""
        kept = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = parameter.data.to(self._device, non_blocking=True, copy=True)
        try:
            yield
        finally:
            for parameter, host in zip(self._parameters, kept, strict=True):
                parameter.data = host
