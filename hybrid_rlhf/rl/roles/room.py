"""Whether a placement has room, before any model is loaded.

The memory of every rank in every phase comes from configs alone: from the memory plan (memory/plan.py) for flattening,
else by the same rules for each rank's roles (placement/memory.py). Both are upper bounds, as all rows have the maximum
length. Without a placement in the config a run that may not fit is only warned, as it was before placements existed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import is_automatic
from hybrid_rlhf.memory.plan import AnyStep, Device, PhaseMemory, Planner, own_device
from hybrid_rlhf.memory.remedies import remedies
from hybrid_rlhf.memory.shapes import Shapes
from hybrid_rlhf.placement.memory import RankMemory, placed_memory
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.placement import Placement, in_words, placed_roles, resolve_placement
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
    planner = PlacedPlanner(machine)
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


@dataclass(frozen=True)
class PlacedPlanner:
    """Estimates steps on one machine; a step of RL under its own placement."""

    machine: Device
    shapes: Shapes = field(default_factory=Shapes)
    starts: dict[str, str] = field(default_factory=dict)
    """See Planner."""

    def phases(self, config: AnyStep) -> list[PhaseMemory]:
        """The phases of a step on all ranks; of `placement: auto`, whose ranks are not known yet, under flattening.

        Raises:
            UserError: when the config's placement does not fit its other settings, or the number of ranks.
        """
        if not isinstance(config, RLConfig) or is_automatic(config.placement):
            return self._planner.phases(config)
        placement = resolve_placement(config.placement, placed_roles(config), ranks=self.machine.ranks)
        return named_phases(self.memory(config, placement), ranks=self.machine.ranks)

    def memory(self, config: RLConfig, placement: Placement) -> list[RankMemory]:
        """The memory of each phase on each rank."""
        return placed_memory(config, placement, self._planner)

    @property
    def _planner(self) -> Planner:
        return Planner(self.machine, self.shapes, self.starts)


def named_phases(memory: Iterable[RankMemory], *, ranks: int) -> list[PhaseMemory]:
    """The phases with their ranks, if these are not all of a run's."""
    return [
        each.phase if len(each.ranks) == ranks else replace(each.phase, ranks=in_words(each.ranks)) for each in memory
    ]


def _excess(phase: PhaseMemory) -> tuple[float, str, float]:
    """Bytes that a phase needs beyond the available ones, where, and the available bytes."""
    machine = phase.machine
    device = (phase.total - machine.device_bytes, "its GPU", machine.device_bytes)
    if machine.host_bytes is None:
        return device
    return max(device, (phase.need.host - machine.host_bytes, "its share of the host", machine.host_bytes))
