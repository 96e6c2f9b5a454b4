"""Checks that a placement has room, before any model is loaded.

The memory of every rank in every phase comes from configs alone (planning/step_memory.py). It is an upper bound, as
all rows have the maximum length. Without a placement in the config, a run that may not fit gets a warning only.
"""

from __future__ import annotations

import logging

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import in_words
from hybrid_rlhf.planning.phase_memory import Device, PhaseMemory, own_device
from hybrid_rlhf.planning.remedies import remedies
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.placement import Placement
from hybrid_rlhf.runtime.world import World, shared_user_errors

logger = logging.getLogger(LOGGER_NAME)
_GIB = 2**30


def require_room(config: RLConfig, placement: Placement, world: World) -> None:
    """Check the memory of GPUs. Every rank calls.

    Raises:
        UserError: on every rank, when a phase of the placement that the config names does not fit.
    """
    if world.device.type != "cuda":
        return
    with shared_user_errors(world):
        fault = None
        if world.is_main:
            fault = misfit(config, placement, own_device(world.size, local=world.local_size))
        if fault is not None and config.placement is not None:
            raise UserError(fault)
        if fault is not None:
            logger.warning("%s", fault)


def misfit(config: RLConfig, placement: Placement, machine: Device) -> str | None:
    """The phase that exceeds its memory most, and what would fit; none where everything fits."""
    planner = Planner(machine)
    misfits = [each for each in planner.memory(config, placement) if not each.phase.fits]
    if not misfits:
        return None
    largest = max(misfits, key=lambda each: _excess(each.phase)[0])
    excess, where, has = _excess(largest.phase)
    found = remedies(planner, config)
    advice = "set " + " or ".join(each.in_words() for each in found) if found else "use more ranks, or a smaller model"
    ranks = f"rank{'s' * (len(largest.ranks) > 1)} {in_words(largest.ranks)}"
    return (
        f"placement {placement.style} must fit into memory, {largest.phase.name} on {ranks} needs "
        f"{(has + excess) / _GIB:.2f} GiB, {excess / _GIB:.2f} more than {where} has: {advice}"
    )


def _excess(phase: PhaseMemory) -> tuple[float, str, float]:
    """Bytes that a phase needs beyond the available ones, where, and the available bytes."""
    machine = phase.machine
    device = (phase.total - machine.device_bytes, "its GPU", machine.device_bytes)
    if machine.host_bytes is None:
        return device
    return max(device, (phase.need.host - machine.host_bytes, "its share of the host", machine.host_bytes))
