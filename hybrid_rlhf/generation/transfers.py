"""Copies between host and device that the host does not wait for.

A copy from ordinary memory waits until the device has computed everything before it, so that a decoding step would
start only after the one before has ended. Copies from page-locked memory do not wait. Torch's allocator of such memory
records an event with each copy and reuses the memory only after that event, so a tensor may be released while its copy
still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Start a copy of numbers on the host, in a tensor or nested sequences; what is launched later reads the copy."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def to_host(result: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the host, which the result waits for and returns."""
    if result.device.type == "cpu":
        return lambda: result
    host = torch.empty(result.shape, dtype=result.dtype, device="cpu", pin_memory=True)
    host.copy_(result, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return host

    return wait
