"""The placement of a run's roles on ranks: as the config names it, or as the planner chooses."""

from __future__ import annotations

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.engines.residency.rules import ResidencyRules, RoleResidency, residency_table
from hybrid_rlhf.loop.setup import resolve
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.placement import CRITIC_COPY, READS_ACTOR, Placement, placed_roles, resolve_placement
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.runtime.world import World, create_groups


def place_roles(config: RLConfig, run: Run, actor_path: str) -> Placement:
    """The ranks of each role; creates their process groups. Every rank calls.

    Raises:
        UserError: for a placement that the run's ranks do not have, or that its roles do not fit.
    """
    placed = placed_roles(config, has_reference=reference_path_of(config, run, actor_path) is not None)
    placement = resolve_placement(config.placement, placed, ranks=run.world.size)
    _require_all_ranks(placement, config.model.expert_parallel, run.world.size)
    create_groups([*placement.groups(), *_sequence_groups(placement, config.model.sequence_parallel)])
    if config.rollout.max_lag:
        create_groups([group for group in placement.sampling_groups if len(group) > 1], own=True)
    return placement


def _sequence_groups(placement: Placement, size: int) -> list[tuple[int, ...]]:
    """The ranks that compute rows together, of each role."""
    roles = placement.roles if size > 1 else {}
    groups = []
    for name, role in roles.items():
        if name in ("sampler", CRITIC_COPY):  # these have inference weights
            continue
        ranks = role.ranks
        if len(ranks) % size:
            raise UserError(
                f"model.sequence_parallel must divide the number of ranks of each role, {name} has {len(ranks)}, got "
                f"{size}: give a divisor, or other ranks"
            )
        groups += [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return groups


def _require_all_ranks(placement: Placement, expert_parallel: int, ranks: int) -> None:
    """Check that all roles are on all ranks if these split experts, as DeepSpeed knows one group of each size."""
    for name, role in placement.roles.items():
        if expert_parallel > 1 and len(role.ranks) < ranks:
            raise UserError(
                f"model.expert_parallel {expert_parallel} needs all roles on all {ranks} ranks, {name} has "
                f"{len(role.ranks)}: leave the placement of roles out"
            )


def log_placement(config: RLConfig, placement: Placement, world: World) -> None:
    """Log the ranks of the roles and where their memory is in each phase; on one rank only for a configured
    placement."""
    if not world.is_main or (config.placement is None and world.size == 1):
        return
    note = [READS_ACTOR] if config.uses_reference and "reference" not in placement.roles else []
    for line in (*placement.table(), *note, *residency_table(residency_of(config, placement, world))):
        logger.info("%s", line)


def residency_of(config: RLConfig, placement: Placement, world: World) -> dict[str, RoleResidency]:
    """The residency of each role's memory."""
    return ResidencyRules.of(config, cuda=world.device.type == "cuda").roles(placement)


def reference_path_of(config: RLConfig, run: Run, actor_path: str) -> str | None:
    """Path of the reference's model; None without a reference, and where it is the actor without its adapters."""
    if not config.uses_reference:
        return None
    # After a warm start the reference is still the model that the actor was first trained from.
    start = config.reference.path or (run.warm_start and config.model.path)
    path = resolve(config, run, str(start), key="reference.path") if start else actor_path
    return None if config.reads_without_adapters(path, actor_path) else path
