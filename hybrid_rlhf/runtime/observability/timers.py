"""Named wall-clock timers in seconds, and peak memory in GiB."""

from __future__ import annotations

import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch


class Timers:
    """Accumulates seconds by name."""

    def __init__(self, device: torch.device, *, on_phase: Callable[[str], None] | None = None) -> None:
        """Start at 0.

        Args:
            device: a GPU is synchronised before and after each block.
            on_phase: called with the name of a block when it begins.
        """
        self._device, self._on_phase = device, on_phase
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block, on a GPU including its queued work."""
        if self._on_phase is not None:
            self._on_phase(name)
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - start

    def take(self) -> dict[str, float]:
        """Return the accumulated seconds by name and reset the timers."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process: allocated on its GPU, or resident on the host without a GPU."""
    if device.type == "cuda":
        return max(_EARLIER_PEAKS[device], torch.cuda.max_memory_allocated(device)) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


_EARLIER_PEAKS: defaultdict[torch.device, int] = defaultdict(int)
"""Bytes; peaks before torch's statistics were reset."""


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Peak bytes that a call allocates on a GPU, beyond what is allocated before it."""
    _EARLIER_PEAKS[device] = max(_EARLIER_PEAKS[device], torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before
