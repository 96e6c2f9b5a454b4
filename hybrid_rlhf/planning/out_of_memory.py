"""Out-of-memory errors with the phase, the requested amount, the plan's estimate and what to change.

The estimate is that of `hybrid-rlhf plan` (planning/step_memory.py). It needs shapes alone, so it works when memory is
exhausted.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

import psutil
import torch

from hybrid_rlhf.configs.errors import RankError, UserError
from hybrid_rlhf.models.pretrained.folders import first_line
from hybrid_rlhf.planning.device import GPU_RESERVE_GIB, Device
from hybrid_rlhf.planning.dotted_keys import Settings, setting, with_settings
from hybrid_rlhf.planning.micro_batches import halve_micro_batches, with_chosen_size
from hybrid_rlhf.planning.phase_memory import AnyStep, PhaseMemory
from hybrid_rlhf.planning.remedies import candidates
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.runtime.world import World

_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "alloc_failed",
)
"""Messages with which torch and CUDA raise a RuntimeError, in lower case."""
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_PASSES = ("step", "scoring", "training")
"""First words of the phases that compute micro-batches."""
_GAIN = 0.9
"""A setting is reported if it reduces the estimate to at most this fraction."""
_REPORTED_SETTINGS = 2
_PLANNED_SETTINGS = 4
"""Limits, because a plan takes seconds and other ranks may wait."""


@contextlib.contextmanager
def explain_out_of_memory(config: AnyStep, run: Run) -> Iterator[None]:
    """Context that turns an out-of-memory error of a run into one line for the user, and halves its micro-batches for
    the next start.

    Raises:
        RankError: on each rank that is out of memory.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RankError(_message(error, config, run)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means that memory of a GPU or of the host is exhausted."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)
    return said or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _message(error: BaseException, config: AnyStep, run: Run) -> str:
    world, phase = run.world, run.watchdog.phase
    half = halve_micro_batches(run) if phase.split()[0] in _PASSES else None
    again = "" if half is None else f"resume auto continues with train.micro_batch_tokens {half}; "
    used, whole = _in_use(world.device)
    found = _REQUESTED.search(str(error))
    requested = f"{_amount(float(found[1]) * _UNITS[found[2].lower()])} requested" if found else "allocation failed"
    place = "the GPU" if world.device.type == "cuda" else "the host"
    try:
        plan = _plan(phase, with_chosen_size(config, run), world, whole)
    except (UserError, MemoryError, RuntimeError, OSError) as fault:
        plan = f"no memory plan ({first_line(fault)}); lower train.micro_batch_tokens"
    return (
        f"out of memory at {phase}: {requested} with {used / 2**30:.1f} of {_amount(whole)} of {place} in use; "
        f"{again}{plan}"
    )


def _plan(phase: str, config: AnyStep, world: World, whole: float) -> str:
    """The estimate of a phase, and settings that reduce it."""
    gpu = world.device.type == "cuda"
    bytes_of_rank = whole - GPU_RESERVE_GIB * 2**30 if gpu else whole / world.local_size
    planner = Planner(Device(world.device, world.size, bytes_of_rank))
    config = with_settings(config, {"train.micro_batch_tokens": config.train.tokens_on(world.device.type)})
    now = _planned(planner, config, phase)
    found = _smaller(planner, config, phase, now)
    ways = (
        [f"{key} (now {setting(config, key)}) to {value}".lower() for key, value in settings.items()]
        for settings in found
    )
    words = " or ".join(" and ".join(way) for way in ways)
    advice = f"set {words}" if words else "see hybrid-rlhf plan for settings that reduce it"
    return f"the plan estimates {_amount(now.total)} for {now.name}; {advice}"


def _smaller(planner: Planner, config: AnyStep, phase: str, now: PhaseMemory) -> list[Settings]:
    """The first candidates, with different keys, that clearly reduce the memory of a phase."""
    found: list[Settings] = []
    tried = 0
    for settings in candidates(config, planner.machine):
        if any(settings.keys() & other.keys() for other in found):
            continue
        # generation depends on rollout settings alone, and on a smaller cache
        if now.name == "generation" and not all(key.startswith("rollout.") for key in settings):
            continue
        if settings.get("rollout.kv_cache_gib", 0.0) * 2**30 > _GAIN * now.need.cache:
            continue
        with contextlib.suppress(UserError):  # violates a rule together with the other settings
            changed = with_settings(config, settings)
            tried += 1
            if _planned(planner, changed, phase).total <= _GAIN * now.total:
                found.append(settings)
        if len(found) == _REPORTED_SETTINGS or tried == _PLANNED_SETTINGS:
            break
    return found


def _planned(planner: Planner, config: AnyStep, phase: str) -> PhaseMemory:
    """The phase of the plan with a name; the largest one if several or none match."""
    phases = planner.phases(config)
    name = phase.split(" of step ")[0]
    return max([p for p in phases if p.name.endswith(name)] or phases, key=lambda p: p.total)


def _in_use(device: torch.device) -> tuple[float, float]:
    """Bytes in use, and all bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free), float(total)
    memory = psutil.virtual_memory()
    return float(memory.total - memory.available), float(memory.total)


def _amount(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
