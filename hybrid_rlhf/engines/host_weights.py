"""Frozen weights that live in host memory and come to the device only while their model computes.

ZeRO-3 has an offload of its own (zero.offload_parameters); this is for whole models. The host's copy never changes
while a model computes, so nothing is copied back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class HostWeights:
    """Holds a frozen module's weights on the host."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Move the weights.

        Args:
            module: frozen and whole; what it is given later must be written in place.
            device: where it computes.
        """
        self._device = device
        self._parameters = list(module.parameters())
        for parameter in self._parameters:
            host = torch.empty_like(parameter, device="cpu", pin_memory=device.type == "cuda", requires_grad=False)
            parameter.data = host.copy_(parameter.data)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """The module computes on the device inside."""
        kept = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = parameter.data.to(self._device, non_blocking=True, copy=True)
        try:
            yield
        finally:
            for parameter, host in zip(self._parameters, kept, strict=True):
                parameter.data = host
