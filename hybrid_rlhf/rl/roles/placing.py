"""Where the roles of a run live: as the config names it, or as the planner chooses."""

from __future__ import annotations

import logging

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.engines.residency.rules import ResidencyRules, RoleResidency, residency_table
from hybrid_rlhf.loop.setup import resolve
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.placement import READS_ACTOR, Placement, placed_roles, resolve_placement
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.runtime.world import World, create_groups

logger = logging.getLogger(LOGGER_NAME)


def place_roles(config: RLConfig, run: Run, actor_path: str) -> Placement:
    """The ranks of each role; creates their process groups. Every rank calls.

    Raises:
        UserError: for a placement that the run's ranks do not have, or that its roles do not fit.
    """
    placed = placed_roles(config, has_reference=reference_path_of(config, run, actor_path) is not None)
    placement = resolve_placement(config.placement, placed, ranks=run.world.size)
    create_groups(placement.groups())
    return placement


def log_placement(config: RLConfig, placement: Placement, world: World) -> None:
    """Log where the roles are, and where their memory is in each phase; on one rank only if the user places them."""
    if not world.is_main or (config.placement is None and world.size == 1):
        return
    note = [READS_ACTOR] if config.uses_reference and "reference" not in placement.roles else []
    for line in (*placement.table(), *note, *residency_table(residency_of(config, placement, world))):
        logger.info("%s", line)


def residency_of(config: RLConfig, placement: Placement, world: World) -> dict[str, RoleResidency]:
    """Where the memory of each role is."""
    return ResidencyRules.of(config, cuda=world.device.type == "cuda").roles(placement)


def reference_path_of(config: RLConfig, run: Run, actor_path: str) -> str | None:
    """The reference's model; none without a reference, and where it is the actor without its adapters."""
    if not config.uses_reference:
        return None
    # After a warm start the reference is still the model that the actor was first trained from.
    start = config.reference.path or (run.warm_start and config.model.path)
    path = resolve(config, run, str(start), key="reference.path") if start else actor_path
    return None if config.reads_without_adapters(path, actor_path) else path
