"""Memory that is used up, by its phase: what was asked for, what the plan had estimated, and the settings to change.

The estimate is the one of `train.py --plan` (memory_plan.py): shapes alone, so it can be made where memory is short.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from hybrid_rlhf.algorithms.memory_plan import AnyStep, Machine, Phase, Planner
from hybrid_rlhf.algorithms.memory_report import GPU_RESERVE_GIB, Settings, options, with_settings
from hybrid_rlhf.configs.errors import RankError, UserError
from hybrid_rlhf.models.folders import first_line
from hybrid_rlhf.runtime.world import World

_WORDS = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "ALLOC_FAILED",
)  # fmt: skip
"""Of what torch and CUDA raise as a plain RuntimeError."""
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_GAIN = 0.9
"""A setting is worth naming if the plan with it takes at most this share."""
_NAMED_SETTINGS, _TRIED_SETTINGS = 2, 4
"""A plan takes seconds, and other ranks may wait."""


@contextlib.contextmanager
def out_of_memory_named(config: AnyStep, world: World, phase: Callable[[], str]) -> Iterator[None]:
    """Turn memory that is used up into the user's one line.

    Args:
        config: of the step.
        world: of the run.
        phase: what the run is at, as `generation of step 12`.

    Raises:
        RankError: on each rank whose memory is used up.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RankError(_told(error, phase(), config, world)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is used up, of a GPU or of the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word.lower() in str(error).lower() for word in _WORDS)


def _told(error: BaseException, phase: str, config: AnyStep, world: World) -> str:
    used, whole = _in_use(world.device)
    asked = _ASKED.search(str(error))
    more = f"{_amount(float(asked[1]) * _UNITS[asked[2].lower()])} more were asked for" if asked else "none was left"
    place = "the GPU" if world.device.type == "cuda" else "the host"
    try:
        plan = _plan(phase, config, world, whole)
    except (UserError, MemoryError, RuntimeError, OSError) as fault:
        plan = f"there is no plan of it ({first_line(fault)}); set train.micro_batch_tokens lower"
    return f"out of memory at {phase}: {more} with {used / 2**30:.1f} of {_amount(whole)} of {place} in use; {plan}"


def _plan(phase: str, config: AnyStep, world: World, whole: float) -> str:
    """The estimate of a phase, and the settings that make it smaller."""
    gpu = world.device.type == "cuda"
    bytes_of_rank = whole - GPU_RESERVE_GIB * 2**30 if gpu else whole / world.local_size
    planner = Planner(Machine(world.device, world.size, bytes_of_rank))
    now = _planned(planner, config, phase)
    found = _smaller(planner, config, phase, now)
    words = " or ".join(
        " and ".join(
            f"{key} (now {_value(_setting(config, key))}) to {_value(value)}" for key, value in settings.items()
        )
        for settings in found
    )
    advice = f"set {words}" if words else "train.py --plan says what makes it smaller"
    return f"the plan estimates {_amount(now.total)} for {now.name}; {advice}"


def _smaller(planner: Planner, config: AnyStep, phase: str, now: Phase) -> list[Settings]:
    """The first settings of the plan's list, of different keys, with which the phase takes clearly less."""
    found: list[Settings] = []
    tried = 0
    for settings in options(config, planner.machine.ranks):
        if any(settings.keys() & other.keys() for other in found) or not _may_help(settings, now):
            continue
        try:
            changed = with_settings(config, settings)
        except UserError:  # against a rule, with what the user has set
            continue
        tried += 1
        if _planned(planner, changed, phase).total <= _GAIN * now.total:
            found.append(settings)
        if len(found) == _NAMED_SETTINGS or tried == _TRIED_SETTINGS:
            break
    return found


def _may_help(settings: Settings, now: Phase) -> bool:
    """What is worth a plan: generation has settings of its own, and a cache that is no smaller changes nothing."""
    if settings.get("rollout.kv_cache_gib", 0.0) * 2**30 > _GAIN * now.need.cache:
        return False
    return now.name != "generation" or all(key.startswith("rollout.") for key in settings)


def _planned(planner: Planner, config: AnyStep, phase: str) -> Phase:
    """The plan's phase of a name; the largest where it knows none of that name, or several."""
    phases = planner.phases(config)
    name = phase.split(" of step ")[0]
    return max([p for p in phases if p.name.endswith(name)] or phases, key=lambda p: p.total)


def _in_use(device: torch.device) -> tuple[float, float]:
    """Bytes in use and bytes there are."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free), float(total)
    memory = psutil.virtual_memory()
    return float(memory.total - memory.available), float(memory.total)


def _setting(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _value(value: Any) -> str:
    return str(value).lower()


def _amount(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
