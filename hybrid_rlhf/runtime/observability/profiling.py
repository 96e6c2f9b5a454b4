"""Profiles: traces of selected steps, and the utilisation of the GPU's arithmetic and memory bandwidth.

Traces are those of torch.profiler (chrome://tracing, Perfetto). MFU is that of Chowdhery et al. 2022 (arXiv
2204.02311), of operations that engines/operations.py counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World

PROFILE_FOLDER = "profile"
_PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0, "RTX 4090": 165.0}
"""Dense bfloat16 peak by part of the GPU's name, from the vendor's data sheets."""
_MEMORY_TB_PER_SECOND = {"H200": 4.8, "H100": 3.35, "A100": 2.039, "L40S": 0.864, "B200": 8.0, "RTX 4090": 1.008}
"""Memory bandwidth by part of the GPU's name, from the same source."""


@contextlib.contextmanager
def profiled(step: int, steps: Sequence[int], folder: Path, world: World) -> Iterator[None]:
    """Write a trace of a step to the run folder, one per rank, if it is among `steps`."""
    if step not in steps:
        yield
        return
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device.type == "cuda")
    with profile(activities=activities) as trace:
        yield
    file = folder / PROFILE_FOLDER / f"step{step}_rank{world.rank}.json.gz"
    file.parent.mkdir(exist_ok=True)
    trace.export_chrome_trace(str(file))
    if world.is_main:
        logger.info("profile of step %d: %s", step, file)


def peak_flops(device: torch.device) -> float | None:
    """Peak bfloat16 operations per second of a GPU; None for an unknown GPU and for a CPU."""
    tflops = _of_gpu(device, _PEAK_TFLOPS)
    return None if tflops is None else tflops * 1e12


def model_flops_utilisation(*, operations: float, seconds: float, ranks: int, device: torch.device) -> dict[str, float]:
    """perf/mfu of this many floating-point operations over all ranks; {} if the peak is unknown."""
    peak = peak_flops(device)
    return {} if peak is None else {"perf/mfu": operations / (seconds * ranks * peak)}


def decode_roofline(*, read_bytes: float, seconds: float, device: torch.device) -> dict[str, float]:
    """perf/decode_roofline: the bytes that decoding must read, as a share of the memory bandwidth in that time.

    {} if the memory bandwidth is unknown or no bytes were counted.
    """
    speed = _of_gpu(device, _MEMORY_TB_PER_SECOND)
    return {} if speed is None or not read_bytes else {"perf/decode_roofline": read_bytes / (seconds * speed * 1e12)}


def _of_gpu(device: torch.device, table: Mapping[str, float]) -> float | None:
    """The entry of a table whose key is part of the GPU's name."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in table.items() if part in name), None)
