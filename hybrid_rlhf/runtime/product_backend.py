"""Selects the library for matrix products on a CPU: the faster of oneDNN and torch's own, measured at the start.

Which one is faster depends on the processor (functional/operations.py). Their results differ in the last bits, so a run
keeps its initial choice: the run folder records it, and a run that resumes on the same kind of machine reads it from
there. A new run takes the choice from ~/.cache/hybrid_rlhf, or measures and writes it there. Rank 0 chooses for all
ranks.

HYBRID_RLHF_PRODUCTS=onednn or =torch overrides the choice. `deterministic: true` always selects oneDNN, so that no
measurement affects the result.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import time
from pathlib import Path

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.operations import BACKENDS, Backend, backend, linear, use_backend
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.reading import cache_folder, stored_object
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World

VARIABLE = "HYBRID_RLHF_PRODUCTS"
RECORD = "products.json"
"""File in a run folder and in the cache: the choice for each machine, by `machine_key`."""
_DETERMINISTIC: Backend = "onednn"
_SHAPES = ((512, 576, 1536), (512, 1536, 576))
"""Numbers of tokens, inputs and outputs."""
_ROUNDS = 6
_LIMIT_SECONDS = 0.3
"""Time after which no further round begins."""


def choose_product_backend(
    world: World, folder: Path, *, checkpoint: Path | None, deterministic: bool, cache: Path | None = None
) -> Backend:
    """Select the library of this run, the same on every rank, and record it in the run folder.

    Args:
        world: every rank calls; rank 0 chooses. Nothing changes on GPUs.
        folder: run folder.
        checkpoint: the checkpoint that the run resumes from, in its own folder or in another run's; or None.
        deterministic: select oneDNN without measuring.
        cache: folder with the choice for this machine; None: ~/.cache/hybrid_rlhf.

    Returns:
        the choice.

    Raises:
        UserError: if the environment variable has an unknown value.
    """
    forced = os.environ.get(VARIABLE)
    if forced is not None and forced not in BACKENDS:
        raise UserError(f"{VARIABLE} must be onednn or torch, got {forced!r}: unset it to use the faster of the two")
    if world.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return backend()
    if world.is_main:
        cache = cache or cache_folder()
        choice, reason = _decided(forced, deterministic) or _found(folder, checkpoint, cache) or _measured(cache)
        logger.info(
            "CPU kernels for matrix products: %s (%s)", {"onednn": "oneDNN", "torch": "torch's own"}[choice], reason
        )
        _write(folder, choice)
    choice = world.broadcast_object(choice if world.is_main else backend())
    use_backend(choice)
    return choice


def recorded_backend(folder: Path) -> Backend | None:
    """The choice that a run folder records for this machine; None if there is none."""
    return next((name for name in BACKENDS if stored_object(folder / RECORD).get(machine_key()) == name), None)


def machine_key() -> str:
    """Everything a choice depends on: processor, instruction set, torch and its number of threads."""
    return "; ".join(
        (
            _processor(),
            torch.backends.cpu.get_cpu_capability(),
            f"torch {torch.__version__}",
            f"{torch.get_num_threads()} threads",
        )
    )


def measure() -> dict[Backend, float]:
    """Seconds of forward and backward for a few shapes with each library; the fastest of several rounds."""
    generator = torch.Generator().manual_seed(0)
    cases = [
        [torch.randn(shape, generator=generator) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))]
        for tokens, inputs, outputs in _SHAPES
    ]
    fastest: dict[tuple[Backend, int], float] = {}
    before = backend()
    start = time.perf_counter()
    try:
        for number in range(_ROUNDS):
            if number > 1 and time.perf_counter() - start > _LIMIT_SECONDS:
                break
            for name, (place, case) in itertools.product(BACKENDS, enumerate(cases)):
                use_backend(name)
                seconds = _seconds(*case)
                if number:  # the first round is a warm-up
                    fastest[name, place] = min(seconds, fastest.get((name, place), seconds))
    finally:
        use_backend(before)
    return {name: sum(fastest[name, place] for place in range(len(cases))) for name in BACKENDS}


def _seconds(x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> float:
    x.requires_grad_(), weight.requires_grad_()
    start = time.perf_counter()
    with torch.enable_grad():
        torch.autograd.grad(linear(x, weight), (x, weight), gradient)
    return time.perf_counter() - start


def _decided(forced: str | None, deterministic: bool) -> tuple[Backend, str] | None:
    for name in BACKENDS:
        if name == forced:
            return name, f"{VARIABLE} is set"
    return (_DETERMINISTIC, "deterministic") if deterministic else None


def _found(folder: Path, checkpoint: Path | None, cache: Path) -> tuple[Backend, str] | None:
    """An earlier choice: of the run being resumed, or else of this machine."""
    places: list[Path] = [] if checkpoint is None else [checkpoint.parent.parent, folder]
    for place in (*places, cache):
        if (name := recorded_backend(place)) is not None:
            return name, "measured earlier on this machine" if place == cache else "recorded in the run folder"
    return None


def _measured(cache: Path) -> tuple[Backend, str]:
    seconds = measure()
    choice = min(BACKENDS, key=lambda name: seconds[name])
    with contextlib.suppress(OSError):  # the next run measures again
        cache.mkdir(parents=True, exist_ok=True)
        _write(cache, choice)
    times = f"oneDNN {1e3 * seconds['onednn']:.0f} ms, torch's own {1e3 * seconds['torch']:.0f} ms"
    return choice, f"measured: {times}"


def _write(folder: Path, choice: Backend) -> None:
    write_whole(folder / RECORD, json.dumps(stored_object(folder / RECORD) | {machine_key(): choice}, indent=1) + "\n")


def _processor() -> str:
    """Name, family, model and stepping of the processor: on virtual machines the name is often only the vendor's."""
    fields = processor_fields()
    if not fields:
        return platform.processor() or platform.machine()
    known = [fields[name] for name in ("model name", "cpu family", "model", "stepping") if name in fields]
    return " ".join(known) or platform.machine()


def processor_fields() -> dict[str, str]:
    """What Linux says of the first processor; {} on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
