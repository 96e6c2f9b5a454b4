"""Selects the library for matrix products on a CPU: torch's own (MKL) on processors of Intel, else oneDNN.

MKL does not use AVX-512 on processors of others, where oneDNN takes half the time; on those of Intel it is 1.1 to 1.5
times as fast (docs/benchmarks/training.md). Their results differ in the last bits. Nothing is measured, so a run that
resumes on the same kind of processor has the same library. Rank 0 chooses for all ranks.

HYBRID_RLHF_PRODUCTS=onednn or =torch overrides the choice. `deterministic: true` selects oneDNN on every processor.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.operations import BACKENDS, Backend, use_backend
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World

VARIABLE = "HYBRID_RLHF_PRODUCTS"


def choose_product_backend(world: World, *, deterministic: bool) -> None:
    """Select the library of this process, the same on every rank. Every rank calls; nothing changes on GPUs.

    Raises:
        UserError: if the environment variable has an unknown value.
    """
    forced = os.environ.get(VARIABLE)
    if forced is not None and forced not in BACKENDS:
        raise UserError(f"{VARIABLE} must be onednn or torch, got {forced!r}: unset it to use the faster of the two")
    if world.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return
    choice = next((name for name in BACKENDS if name == forced), "onednn" if deterministic else faster_backend())
    choice = world.broadcast_object(choice)
    if world.is_main:
        logger.info("CPU kernels for matrix products: %s", {"onednn": "oneDNN", "torch": "torch's own"}[choice])
    use_backend(choice)


def faster_backend() -> Backend:
    """The library that is faster on this processor."""
    return "torch" if processor_fields().get("vendor_id") == "GenuineIntel" else "onednn"


def processor_fields() -> dict[str, str]:
    """What Linux says of the first processor; {} on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
