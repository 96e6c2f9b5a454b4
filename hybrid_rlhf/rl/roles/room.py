"""Whether a placement has room, before any model is loaded.

The memory of every rank in every phase comes from configs alone: from the memory plan (memory/plan.py) for flattening,
else by the same rules for each rank's roles (placement/memory.py). Both are upper bounds, as all rows have the maximum
length. Without a placement in the config a run that may not fit is only warned, as it was before placements existed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import Placement, in_words, resolve_placement
from hybrid_rlhf.memory.plan import Device, PhaseMemory, own_device
from hybrid_rlhf.memory.remedies import remedy
from hybrid_rlhf.memory.shapes import Shapes
from hybrid_rlhf.placement.memory import RankMemory, placed_memory
from hybrid_rlhf.rl.roles.placing import placed_roles
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
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
    planner = PlacedPlanner(machine, has_reference="reference" in placement.roles)
    misfits = [each for each in planner.memory(config, placement) if not each.phase.fits]
    if not misfits:
        return None
    largest = max(misfits, key=lambda each: _excess(each.phase)[0])
    excess, where, has = _excess(largest.phase)
    found = remedy(planner, config)
    advice = "use more ranks, or a smaller model" if found is None else f"set {_in_words(found)}"
    ranks = f"rank{'s' * (len(largest.ranks) > 1)} {in_words(largest.ranks)}"
    return (
        f"placement {placement.style} must fit into memory, {largest.phase.name} on {ranks} needs "
        f"{(has + excess) / _GIB:.2f} GiB, {excess / _GIB:.2f} more than {where} has: {advice}"
    )


@dataclass(frozen=True)
class PlacedPlanner:
    """Estimates a step under its own placement, on one machine."""

    machine: Device
    has_reference: bool
    """Whether the reference is a model of its own."""
    shapes: Shapes = field(default_factory=Shapes)

    def phases(self, config: RLConfig) -> list[PhaseMemory]:
        """The phases of all ranks.

        Raises:
            UserError: when the config's placement does not fit its other settings.
        """
        placed = placed_roles(config, has_reference=self.has_reference)
        placement = resolve_placement(config.placement, placed, ranks=self.machine.ranks)
        return [each.phase for each in self.memory(config, placement)]

    def memory(self, config: RLConfig, placement: Placement) -> list[RankMemory]:
        """The memory of each phase on each rank."""
        return placed_memory(config, placement, self.machine, self.shapes)


def _excess(phase: PhaseMemory) -> tuple[float, str, float]:
    """Bytes that a phase needs beyond the available ones, where, and the available bytes."""
    machine = phase.machine
    device = (phase.total - machine.device_bytes, "its GPU", machine.device_bytes)
    if machine.host_bytes is None:
        return device
    return max(device, (phase.need.host - machine.host_bytes, "its share of the host", machine.host_bytes))


def _in_words(settings: dict[str, Any]) -> str:
    return " ".join(f"--{key} {str(value).lower()}" for key, value in settings.items())
