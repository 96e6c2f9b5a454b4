"""The placement of a run: the ranks and parallelism of every role, and their table.

configs/sections/placement.py has the settings of the user; this module fills in the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import (
    TEACHER_PREFIX,
    PlacementConfig,
    RolePlacements,
    RoleRanks,
    ZeroStage,
    in_words,
    is_role,
)
from hybrid_rlhf.configs.sections.rules import nearest_hint, require
from hybrid_rlhf.configs.sections.training import frozen_zero

CRITIC_COPY = "critic_copy"
"""Role of the critic's inference weights, which compute its values on ranks that do not train it."""

READS_ACTOR = "  the reference is the actor without its adapters, on the actor's ranks"
"""Line of the tables for a reference that is not a separate model."""


@dataclass(frozen=True)
class RolePlacement:
    """Ranks and parallelism of a role."""

    ranks: tuple[int, ...]
    """Ranks in the run, ascending."""
    zero: ZeroStage = 0
    """ZeRO stage."""
    tensor_parallel: int = 1
    """Number of ranks that share one model's inference weights."""

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The role's tensor-parallel groups."""
        size = self.tensor_parallel
        return [self.ranks[first : first + size] for first in range(0, len(self.ranks), size)]

    @property
    def parallelism(self) -> str:
        """The parallelism in words."""
        parts = [f"ZeRO-{self.zero}"] * bool(self.zero)
        parts += [f"tensor parallel {self.tensor_parallel}"] * (self.tensor_parallel > 1)
        return ", ".join(parts) or "replicated" * (len(self.ranks) > 1) or "whole"


@dataclass(frozen=True)
class PlacedRoles:
    """The roles that a step has to place."""

    zero: Mapping[str, ZeroStage]
    """ZeRO stages of the configs, by role: actor first, critic, reference and teacher if the step has them, and
    the names of reward models."""
    tensor_parallel: int = 1
    """The value of `rollout.tensor_parallel`."""
    max_lag: int = 0
    """The value of `rollout.max_lag`."""
    shares_base: bool = False
    """True if the critic has its adapters on the actor's weights."""
    reads_actor: bool = False
    """True if the reference is the actor without its adapters."""

    @property
    def rewards(self) -> tuple[str, ...]:
        """Names of the reward models."""
        return tuple(name for name in self.zero if _is_reward(name))

    @property
    def frozen(self) -> tuple[str, ...]:
        """Roles that only score."""
        return tuple(name for name in self.zero if name not in ("actor", "critic"))


@dataclass(frozen=True)
class Placement:
    """The ranks of all roles. A separate sampler has the role "sampler"; without it the actor's ranks sample."""

    roles: Mapping[str, RolePlacement]
    style: str
    """flattening, interleaving, separation, or hybrid where the user names ranks."""

    def __getitem__(self, role: str) -> RolePlacement:
        return self.roles[role]

    @property
    def separate_sampler(self) -> bool:
        """True if the sampler has ranks of its own."""
        return "sampler" in self.roles

    @property
    def sampler(self) -> RolePlacement:
        """The placement of the role that samples."""
        return self.roles.get("sampler", self.roles["actor"])

    @property
    def sampler_shares_ranks(self) -> bool:
        """True if other roles compute on a rank of the separate sampler."""
        other_ranks = (role.ranks for name, role in self.roles.items() if name != "sampler")
        return any(not {*self.sampler.ranks}.isdisjoint(ranks) for ranks in other_ranks)

    @property
    def reference_beside_rewards(self) -> bool:
        """True if the reference and the reward models have no rank in common, and so read at the same time."""
        rewards = {rank for name, role in self.roles.items() if _is_reward(name) for rank in role.ranks}
        return "reference" in self.roles and bool(rewards) and rewards.isdisjoint(self["reference"].ranks)

    @property
    def sampling_groups(self) -> list[tuple[int, ...]]:
        """The tensor-parallel groups that sample."""
        return self.sampler.groups

    def groups(self) -> list[tuple[int, ...]]:
        """Ranks of the process groups that a run of this placement needs, except the groups of threads."""
        groups = [*(role.ranks for role in self.roles.values())]
        groups += [group for role in self.roles.values() if role.tensor_parallel > 1 for group in role.groups]
        return sorted(set(groups))

    @property
    def ranks_by_roles(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """The ranks that hold the same roles, by these roles."""
        roles: dict[int, tuple[str, ...]] = defaultdict(tuple)
        for name, role in self.roles.items():
            for rank in role.ranks:
                roles[rank] += (name,)
        ranks: dict[tuple[str, ...], tuple[int, ...]] = defaultdict(tuple)
        for rank in sorted(roles):
            ranks[roles[rank]] += (rank,)
        return ranks

    def table(self) -> list[str]:
        """Lines that show each role's ranks and parallelism, and what each rank computes in each phase."""
        rows = [("role", "ranks", "parallelism")]
        rows += [(role_label(name), in_words(role.ranks), role.parallelism) for name, role in self.roles.items()]
        sampler = "sampler" if self.separate_sampler else "actor"
        trained = ("actor", "critic")
        valued = ("actor", CRITIC_COPY if CRITIC_COPY in self.roles else "critic")
        phases = [("ranks", "sampling", "scoring", "log-probs and values", "updates")]
        for names, ranks in self.ranks_by_roles.items():
            mine = (
                [name for name in names if name == sampler],
                [name for name in names if name not in (*trained, CRITIC_COPY, "sampler")],
                [name for name in names if name in valued],
                [name for name in names if name in trained],
            )
            sampling, scoring, values, updates = (", ".join(map(role_label, part)) or "-" for part in mine)
            phases.append((in_words(ranks), sampling, scoring, values, updates))
        return [f"placement: {self.style}", *aligned(rows), *aligned(phases)]


def role_label(name: str) -> str:
    """A role's name in tables; the name of a reward model has a prefix."""
    return f"reward: {name}" if _is_reward(name) else name


def _is_reward(name: str) -> bool:
    return not is_role(name)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def placed_roles(config: RLConfig, *, has_reference: bool | None = None) -> PlacedRoles:
    """The roles that a step has to place. `has_reference` is true if the reference is a separate model; None derives it
    from model.path."""
    if has_reference is None:
        path = config.reference.path or config.model.path
        has_reference = config.uses_reference and not config.reads_without_adapters(path, config.model.path)
    zero = {"actor": config.actor.zero.stage}
    zero |= {"critic": config.critic_zero.stage} if config.critic is not None else {}
    zero |= {"reference": frozen_zero(config.actor.zero).stage} if has_reference else {}
    teachers = config.teacher.models if config.teacher is not None else {}
    zero |= dict.fromkeys(teachers, frozen_zero(config.actor.zero).stage)
    models = [component.label for component in config.reward.named if component.model is not None]
    zero |= dict.fromkeys(models, frozen_zero(config.critic_zero).stage)
    return PlacedRoles(
        zero,
        tensor_parallel=config.rollout.tensor_parallel,
        max_lag=config.rollout.max_lag,
        shares_base=config.critic is not None and config.critic.share_base,
        reads_actor=config.uses_reference and not has_reference,
    )


def resolve_placement(settings: PlacementConfig | None, placed: PlacedRoles, *, ranks: int) -> Placement:
    """The placement of a run: the user's settings, completed.

    Args:
        settings: settings of the user; None: flattening.
        placed: the roles of the step.
        ranks: number of ranks of the run.

    Raises:
        UserError: for a role that the step does not have, ranks that do not exist or must not be shared, or tensor
            parallelism that does not divide.
    """
    style = "flattening" if settings is None else settings.style
    roles = dict(settings.roles) if isinstance(settings, RolePlacements) else {}
    if "reward" in roles and "reward" not in placed.zero:  # all reward models
        shared = roles.pop("reward")
        roles = {name: shared for name in placed.rewards} | roles
        require(bool(placed.rewards), "placement.reward places reward models, the step has none: leave it out")
    if "teacher" in roles and (others := [name for name in placed.zero if name.startswith(TEACHER_PREFIX)]):
        shared = roles["teacher"] if "teacher" in placed.zero else roles.pop("teacher")
        roles = dict.fromkeys(others, shared) | roles
    names = (*placed.zero, *([CRITIC_COPY] if "critic" in placed.zero else []), "sampler")
    require(
        not placed.reads_actor or "reference" not in roles,
        "with LoRA the reference is the actor without its adapters, on the actor's ranks, got placement.reference: "
        "leave it out, or set reference.path",
    )
    for name in roles:
        require(
            name in names,
            f"placement.{name} must be a role of the step, which has {', '.join(names)}: "
            f"{nearest_hint(name, names, otherwise='give one of them')}",
        )
    set_ranks = {name: role.ranks for name, role in roles.items() if role.ranks is not None}
    for name, mine in set_ranks.items():
        require(
            mine[-1] < ranks,
            f"placement.{name}.ranks must be below the number of ranks, {ranks}, got {mine[-1]}: start more ranks or "
            "the missing hosts, or name others",
        )
    sampler = roles.get("sampler", RoleRanks())
    together = sampler.tensor_parallel or placed.tensor_parallel
    filled = _filled(style, placed, set_ranks, ranks, together) | set_ranks
    if CRITIC_COPY in roles and CRITIC_COPY not in filled:
        require("sampler" in filled, "placement.critic_copy needs ranks, got none and no sampler's: give it some")
        filled[CRITIC_COPY] = filled["sampler"]
    parallel = {name: role.tensor_parallel or 1 for name, role in roles.items()}
    parallel["sampler" if "sampler" in filled else "actor"] = together
    zero = {**placed.zero, **{name: role.zero for name, role in roles.items() if role.zero is not None}}
    placement = Placement(
        {
            name: RolePlacement(filled[name], zero.get(name, 0), parallel.get(name, 1))
            for name in names
            if name in filled
        },
        "hybrid" if set_ranks else style,
    )
    _check(placement, placed)
    return placement


def _filled(
    style: str, placed: PlacedRoles, set_ranks: Mapping[str, tuple[int, ...]], ranks: int, together: int
) -> dict[str, tuple[int, ...]]:
    """Ranks of all roles by a style, from the ranks that are set for some."""
    whole = tuple(range(ranks))
    require(
        style == "flattening" or ranks > 1 or bool(set_ranks),
        f"placement {style} needs 2 ranks or more, got {ranks}: start more, or give flattening",
    )
    sampler = set_ranks.get("sampler")
    if style == "separation" and sampler is None:
        # a whole number of tensor-parallel groups, on half of the ranks at most
        free = [rank for rank in whole if rank not in set_ranks.get("actor", ())]
        count = len(free) if "actor" in set_ranks else ranks // 2 // together * together
        require(
            0 < count < ranks and count % together == 0,
            f"placement separation needs {_ranks_in_words(together)} for a "
            f"{'tensor-parallel ' * (together > 1)}sampler beside the actor's, got {_ranks_in_words(ranks)}: start "
            "more, or name placement.sampler.ranks",
        )
        sampler = tuple(free[len(free) - count :])
    ranks_of = {} if sampler is None else {"sampler": sampler}
    training = set_ranks.get("actor", tuple(rank for rank in whole if rank not in (sampler or ())))
    require(bool(training), f"placement.actor needs ranks, placement.sampler takes all {ranks}: leave it some")
    ranks_of |= {name: training for name in placed.zero if name in ("actor", "critic")}
    beside = whole if sampler is None else sampler
    frozen = [name for name in placed.frozen if name not in set_ranks]
    parts = min(len(frozen), len(beside)) if style == "interleaving" else 1
    for place, name in enumerate(frozen):
        part = place % max(parts, 1)
        ranks_of[name] = beside[part * len(beside) // parts : (part + 1) * len(beside) // parts]
    return ranks_of


def _check(placement: Placement, placed: PlacedRoles) -> None:
    sampler = placement.sampler
    actor = placement["actor"]
    for name, role in placement.roles.items():
        count = len(role.ranks)
        who = "sampler" if role is sampler else name
        known = [str(size) for size in range(1, count + 1) if count % size == 0]
        require(
            count % role.tensor_parallel == 0,
            f"tensor parallelism must divide the {_ranks_in_words(count)} of the {who}, got {role.tensor_parallel}: "
            f"use {'one of ' * (count > 1)}{', '.join(known)}{', or more ranks' * (count == 1)}",
        )
    for name in placed.frozen:
        require(
            placement[name].zero in (0, 3),
            f"placement.{name} is frozen, so ZeRO shards its weights (3) or nothing (0), got {placement[name].zero}: "
            "give one of them",
        )
    require(
        not placed.shares_base or placement["critic"].ranks == actor.ranks,
        "critic.share_base needs the critic on the actor's ranks, got others in placement: leave share_base or "
        "placement.critic out",
    )
    if CRITIC_COPY in placement.roles:
        shared = sorted({*placement[CRITIC_COPY].ranks} & {*placement["critic"].ranks})
        require(
            not shared,
            f"placement.critic_copy computes values on ranks without the critic, got {in_words(shared)} of its too: "
            "name others, or leave critic_copy out",
        )
    if not placement.separate_sampler:
        return
    shared = sorted({*sampler.ranks} & {*actor.ranks})
    require(
        not shared,
        f"placement.sampler has ranks of its own, got {in_words(shared)} of the actor's too: name others, or leave "
        "sampler out to sample on the actor's ranks",
    )
    if placed.max_lag and "critic" in placement.roles:
        shared = sorted({*sampler.ranks} & {*placement["critic"].ranks})
        require(
            not shared,
            f"rollout.max_lag {placed.max_lag} samples while the critic trains, got both on ranks "
            f"{in_words(shared)} in placement: name others for placement.critic",
        )


def _ranks_in_words(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"
