"""Named wall-clock timers in seconds, and peak memory in GiB, on a GPU of each timed phase."""

from __future__ import annotations

import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch


class Timers:
    """Accumulates seconds by name, and on a GPU the peak memory of each name."""

    def __init__(self, device: torch.device, *, on_phase: Callable[[str], None] | None = None) -> None:
        """Start at 0.

        Args:
            device: a GPU is synchronised before and after each block.
            on_phase: called with the name of a block when it begins.
        """
        self._device = device
        self._on_phase = on_phase
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        """Open blocks, the innermost last."""
        self._peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block, including its queued work on a GPU."""
        if self._on_phase is not None:
            self._on_phase(name)
        start = self._now()
        self._note_peak()
        self._open.append(name)
        try:
            yield
        finally:
            self._seconds[name] += self._now() - start
            self._note_peak()
            self._open.remove(name)  # a background thread may have begun another

    def take(self) -> dict[str, float]:
        """Return the accumulated seconds by name and reset the timers."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    @property
    def measures_memory(self) -> bool:
        """True if blocks have peaks, which only a GPU measures."""
        return self._device.type == "cuda"

    @property
    def peaks_gib(self) -> dict[str, float]:
        """Peak memory of each phase so far, allocated on the GPU; {} without a GPU."""
        return {name: peak / 2**30 for name, peak in self._peaks.items()}

    def _note_peak(self) -> None:
        """Assign the peak since the last call to the open blocks."""
        if not self.measures_memory:
            return
        peak = torch.cuda.max_memory_allocated(self._device)
        for name in self._open:
            self._peaks[name] = max(self._peaks.get(name, 0), peak)
        _reset_peak(self._device)

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
"""Peaks in bytes before torch's statistics were reset."""


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Peak bytes that a call allocates on a GPU, beyond what is allocated before it."""
    _reset_peak(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _reset_peak(device: torch.device) -> None:
    """Reset torch's statistics, and remember their peak."""
    _EARLIER_PEAKS[device] = max(_EARLIER_PEAKS[device], torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
