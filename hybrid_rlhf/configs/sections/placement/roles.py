"""Ranks and parallelism of the roles of an RL step, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

ZeroStage = Literal[0, 1, 2, 3]
CRITIC_COPY = "critic_copy"
"""The role of inference weights of the critic, which compute its values on ranks that do not train it."""

READS_ACTOR = "  the reference is the actor without its adapters, on the actor's ranks"
"""Line of the tables for a reference that is no model of its own."""


@dataclass(frozen=True)
class RolePlacement:
    """Ranks and parallelism of a role."""

    ranks: tuple[int, ...]
    """In the run, ascending."""
    zero: ZeroStage = 0
    """ZeRO stage."""
    tensor_parallel: int = 1
    """Ranks that share one model's inference weights."""

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Its tensor-parallel groups."""
        size = self.tensor_parallel
        return [self.ranks[first : first + size] for first in range(0, len(self.ranks), size)]

    @property
    def parallelism(self) -> str:
        """In words."""
        parts = [f"ZeRO-{self.zero}"] * bool(self.zero)
        parts += [f"tensor parallel {self.tensor_parallel}"] * (self.tensor_parallel > 1)
        return ", ".join(parts) or "replicated" * (len(self.ranks) > 1) or "whole"


@dataclass(frozen=True)
class PlacedRoles:
    """What a step has to place."""

    zero: Mapping[str, int]
    """ZeRO stages of the configs, by role: actor first, critic and reference where there are ones, and the names of
    reward models."""
    tensor_parallel: int = 1
    """`rollout.tensor_parallel`."""
    policy_lag: int = 0
    shares_base: bool = False
    """Whether the critic has its adapters on the actor's weights."""
    reads_actor: bool = False
    """Whether the reference is the actor without its adapters."""
    refreshes_reference: bool = False
    """Whether the reference takes the actor's weights now and then."""

    @property
    def rewards(self) -> tuple[str, ...]:
        """Names of the reward models."""
        return tuple(name for name in self.zero if name not in ("actor", "critic", "reference"))

    @property
    def frozen(self) -> tuple[str, ...]:
        """Roles that only score."""
        return tuple(name for name in self.zero if name not in ("actor", "critic"))


@dataclass(frozen=True)
class Placement:
    """Every role's ranks. A sampler of its own has the role "sampler"; without one the actor's ranks sample."""

    roles: Mapping[str, RolePlacement]
    style: str
    """flattening, interleaving, separation, or hybrid where the user names ranks."""
    with_actor: bool = False
    """Whether the actor's ranks sample part of each rollout beside a sampler on ranks of its own."""

    def __getitem__(self, role: str) -> RolePlacement:
        return self.roles[role]

    @property
    def separate_sampler(self) -> bool:
        """Whether the sampler has ranks of its own."""
        return "sampler" in self.roles

    @property
    def sampler(self) -> RolePlacement:
        """Where completions are sampled."""
        return self.roles.get("sampler", self.roles["actor"])

    @property
    def sampler_shares_ranks(self) -> bool:
        """Whether other roles compute on a rank of the sampler's own."""
        others = (role.ranks for name, role in self.roles.items() if name != "sampler")
        return any(not {*self.sampler.ranks}.isdisjoint(ranks) for ranks in others)

    @property
    def reference_beside_rewards(self) -> bool:
        """Whether the reference and reward models have no rank in common, and so read at the same time."""
        rewards = {rank for name, role in self.roles.items() if _is_reward(name) for rank in role.ranks}
        return "reference" in self.roles and bool(rewards) and rewards.isdisjoint(self["reference"].ranks)

    @property
    def sampling_groups(self) -> list[tuple[int, ...]]:
        """The tensor-parallel groups that sample."""
        roles = [self.sampler] + [self["actor"]] * self.with_actor
        return [group for role in roles for group in role.groups]

    def groups(self) -> list[tuple[int, ...]]:
        """Ranks of the process groups that a run of this placement needs, without those of threads."""
        groups = [*(role.ranks for role in self.roles.values())]
        groups += [group for role in self.roles.values() if role.tensor_parallel > 1 for group in role.groups]
        return sorted(set(groups))

    def table(self) -> list[str]:
        """Lines that show each role's ranks and parallelism, and what each rank computes in each phase."""
        rows = [("role", "ranks", "parallelism")]
        rows += [(role_label(name), in_words(role.ranks), role.parallelism) for name, role in self.roles.items()]
        held: dict[tuple[str, ...], list[int]] = {}
        for rank in sorted({rank for role in self.roles.values() for rank in role.ranks}):
            held.setdefault(tuple(name for name, role in self.roles.items() if rank in role.ranks), []).append(rank)
        samplers = ("sampler",) + ("actor",) * self.with_actor if self.separate_sampler else ("actor",)
        trained = ("actor", "critic")
        valued = ("actor", CRITIC_COPY if CRITIC_COPY in self.roles else "critic")
        phases = [("ranks", "sampling", "scoring", "log-probs and values", "updates")]
        for names, ranks in held.items():
            mine = (
                [name for name in names if name in samplers],
                [name for name in names if name not in (*trained, CRITIC_COPY, "sampler")],
                [name for name in names if name in valued],
                [name for name in names if name in trained],
            )
            sampling, scoring, values, updates = (", ".join(map(role_label, part)) or "-" for part in mine)
            phases.append((in_words(ranks), sampling, scoring, values, updates))
        return [f"placement: {self.style}", *aligned(rows), *aligned(phases)]


def role_label(name: str) -> str:
    """A role's name in tables, which says of a reward model that it is one."""
    return f"reward: {name}" if _is_reward(name) else name


def _is_reward(name: str) -> bool:
    return name not in ("actor", "critic", CRITIC_COPY, "reference", "sampler")


def in_words(ranks: Sequence[int]) -> str:
    """Ranks as ranges: 0-3,6."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
