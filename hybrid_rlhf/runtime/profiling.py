"""Where the time of a step goes: a trace of chosen steps, and how much of the device's arithmetic training uses.

The trace is torch's (chrome://tracing, Perfetto). MFU is Chowdhery et al. 2022 (arXiv 2204.02311), appendix B, without
attention: 6 operations a parameter and token.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World

PROFILE_FOLDER = "profile"
logger = logging.getLogger(LOGGER_NAME)
_PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0, "RTX 4090": 165.0}
"""Dense bfloat16, by what a GPU's name contains; from the vendor's data sheets."""


@contextlib.contextmanager
def profiled(step: int, steps: Sequence[int], folder: Path, world: World) -> Iterator[None]:
    """Write a trace of a step to the run's folder, one a rank, if it is among those chosen."""
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
    """Operations a second that a GPU can do in bfloat16; none for one that is not known, and for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in _PEAK_TFLOPS.items() if part in name), None)


def model_flops_utilisation(
    *, parameters: float, tokens: float, seconds: float, ranks: int, device: torch.device
) -> dict[str, float]:
    """perf/mfu of training so many tokens over all ranks; {} where the peak is not known."""
    peak = peak_flops(device)
    return {} if peak is None else {"perf/mfu": 6 * parameters * tokens / (seconds * ranks * peak)}
