"""Profiles: traces of selected steps, and the utilisation of the GPU's arithmetic and memory bandwidth.

Traces are those of torch.profiler (chrome://tracing, Perfetto). MFU is that of Chowdhery et al. 2022 (arXiv
2204.02311), of operations that engines/operations.py counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World

PROFILE_FOLDER = "profile"


class Peaks(NamedTuple):
    """What a GPU can do at most, from the data sheet."""

    tflops: float
    """Dense matrix products in bfloat16."""
    memory_gb_per_second: float


PEAKS = {
    "B200": Peaks(2250, 8000),
    "H100 PCIe": Peaks(756, 2000),
    "H100": Peaks(989, 3350),
    "H200": Peaks(989, 4800),
    "A100-SXM4-80GB": Peaks(312, 2039),
    "A100 80GB PCIe": Peaks(312, 1935),
    "A100": Peaks(312, 1555),
    "A800": Peaks(312, 2039),
    "L40S": Peaks(362, 864),
    "A10G": Peaks(70, 600),
    "RTX 4090": Peaks(165.2, 1008),
    "RTX 3090": Peaks(71, 936),
    "MI300X": Peaks(1307, 5300),
}
"""By part of the name by which torch knows the GPU; the first one counts."""


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


def describe_peaks(device: torch.device) -> str | None:
    """A line that says what the perf/ metrics are relative to; None for an unknown GPU and on a CPU."""
    found = _peaks_of(device)
    return found and (
        f"perf/mfu and perf/decode_* are relative to the data sheet of {found[0]}: {found[1].tflops:g} TFLOP/s in "
        f"bfloat16, {found[1].memory_gb_per_second:,g} GB/s of memory"
    )


def model_flops_utilisation(*, operations: float, seconds: float, ranks: int, device: torch.device) -> dict[str, float]:
    """perf/mfu of this many floating-point operations over all ranks; {} if the peak is unknown."""
    peak = peak_flops(device)
    return {} if peak is None else {"perf/mfu": operations / (seconds * ranks * peak)}


def peak_flops(device: torch.device) -> float | None:
    """Operations per second of a GPU's matrix products in bfloat16, by its data sheet; None if it is unknown."""
    found = _peaks_of(device)
    return None if found is None else found[1].tflops * 1e12


def decode_roofline(*, read_bytes: float, operations: float, seconds: float, device: torch.device) -> dict[str, float]:
    """How near decoding is to what the GPU allows (the roofline, Williams et al. 2009).

    perf/decode_mfu and perf/decode_bandwidth are the shares of the peak of products and of memory bandwidth that the
    operations and bytes of decoding need, perf/decode_roofline the larger one, which says what bounds decoding. {} if
    the peaks are unknown or nothing was counted.
    """
    found = _peaks_of(device)
    if found is None or not read_bytes:
        return {}
    products = operations / (seconds * found[1].tflops * 1e12)
    bandwidth = read_bytes / (seconds * found[1].memory_gb_per_second * 1e9)
    return {
        "perf/decode_mfu": products,
        "perf/decode_bandwidth": bandwidth,
        "perf/decode_roofline": max(products, bandwidth),
    }


def _peaks_of(device: torch.device) -> tuple[str, Peaks] | None:
    """The entry whose key is part of the GPU's name."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next(((part, peaks) for part, peaks in PEAKS.items() if part in name), None)
