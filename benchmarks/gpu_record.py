"""What a part of `benchmarks.gpu_hour` has measured so far, in an archive that grows with every figure.

A figure that is there is not measured again, so a part that was cut goes on where it was.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import find, write
from hybrid_rlhf.runtime.world import default_device

DEVICE = default_device()
ON_GPU = DEVICE.type == "cuda"


class Record:
    """Figures of a part by name, a member of gpu.zip in a folder."""

    def __init__(self, part: str, folder: Path) -> None:
        self._member = f"{part}.json"
        self._folder = folder
        self.content: dict[str, Any] = {"done": False, "figures": {}}
        known = find("gpu", self._member, folder)
        if known is not None:
            self.content = json.loads(known)

    @property
    def figures(self) -> dict[str, Any]:
        """All so far."""
        return self.content["figures"]  # type: ignore[no-any-return]

    def measure(self, name: str, function: Callable[[], Any]) -> None:
        """Take a figure unless it is there. An error is recorded in its place, and does not end the part."""
        if name in self.figures and "error" not in (self.figures[name] or {}):
            return
        start = time.perf_counter()
        try:
            value = function()
        except Exception as error:  # noqa: BLE001 - the next figure may work; the error is recorded
            value = {"error": f"{type(error).__name__}: {error}"[:2000]}
        self.figures[name] = value
        self.write()
        print(f"{name}: {json.dumps(value)[:300]}  ({time.perf_counter() - start:.1f} s)", flush=True)

    def write(self, **more: Any) -> None:
        """Keep what there is."""
        self.content.update(more)
        write("gpu", self._member, json.dumps(self.content, indent=1) + "\n", self._folder)


def synchronize() -> None:
    """Wait for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


def seconds(function: Callable[[], Any], *, runs: int = 20, calls: int = 1, warmup: int = 2) -> float:
    """Median seconds of a call after some to warm up; `calls` are timed together."""
    times = []
    for run in range(runs + warmup):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        if run >= warmup:
            times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def limits(*, small: bool) -> dict[str, float]:
    """What this device does at most: bytes read and written by a copy, and operations of a large bfloat16 product."""
    elements, width = (2**22, 256) if small else (2**30, 8192)
    source = torch.ones(elements, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), runs=10)
    a = torch.ones(width, width, dtype=torch.bfloat16, device=DEVICE)
    product = seconds(lambda: a @ a, runs=10)
    return {"copy_gb_per_second": 2 * elements / copy / 1e9, "bf16_tflop_per_second": 2 * width**3 / product / 1e12}
