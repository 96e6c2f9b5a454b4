"""Named wall-clock timers and the peak of memory. Seconds and GiB."""

from __future__ import annotations

import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch


class Timers:
    """Adds up seconds by name until they are taken."""

    def __init__(self, device: torch.device, *, on_phase: Callable[[str], None] | None = None) -> None:
        """Start at 0.

        Args:
            device: whose work is waited for.
            on_phase: called with a block's name as it begins.
        """
        self._device, self._on_phase = device, on_phase
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block; on a GPU, to the end of its work."""
        if self._on_phase is not None:
            self._on_phase(name)
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - start

    def take(self) -> dict[str, float]:
        """The seconds so far by name; the timers start again at 0."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has held: allocated on its GPU, or resident on the host without one."""
    if device.type == "cuda":
        return max(_EARLIER_PEAKS[device], torch.cuda.max_memory_allocated(device)) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


_EARLIER_PEAKS: defaultdict[torch.device, int] = defaultdict(int)
"""Bytes, from before torch's own record was set back."""


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """The most that a call allocates on a GPU beyond what is allocated before it."""
    _EARLIER_PEAKS[device] = max(_EARLIER_PEAKS[device], torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before
