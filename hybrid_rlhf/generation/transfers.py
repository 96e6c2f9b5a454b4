"""Asynchronous copies between host and device.

A copy from pageable memory waits until the device has finished all earlier work, so a decoding step could start only
after the previous one has ended. Copies from page-locked memory do not wait. Torch's allocator of page-locked memory
records an event with each copy and reuses the memory only after that event, so a tensor may be released while its copy
still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Start a copy of host values, a tensor or nested sequences, to a device; kernels launched later read the copy."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cuda" and host.device.type == "cpu":  # torch's default device may be a GPU
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def to_host(result: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the host; returns a function that waits for the copy and returns it."""
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
