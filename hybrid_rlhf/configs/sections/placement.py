"""Where each role of an RL step lives: ranks and parallelism, as given and filled in.

Source: flattening, interleaving and separation, arXiv 2312.11819 (FlexRLHF). Deviation: ranks are named, never
fractions of their number, so that a placement says where each role is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, cast

from hybrid_rlhf.configs.sections.rules import require

STYLES = ("flattening", "interleaving", "separation")
AUTO = "auto"
"""The planner chooses (rl/roles/automatic.py)."""
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_KEYS = ("ranks", "zero", "tensor_parallel")
_MOST_RANKS = 2**16
ZeroStage = Literal[0, 1, 2, 3]


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
    def sampling_groups(self) -> list[tuple[int, ...]]:
        """The tensor-parallel groups that sample."""
        ranks, together = self.sampler.ranks, self.sampler.tensor_parallel
        return [ranks[first : first + together] for first in range(0, len(ranks), together)]

    def groups(self) -> list[tuple[int, ...]]:
        """Ranks of all process groups that a run of this placement needs."""
        groups = [*(role.ranks for role in self.roles.values()), *self.sampling_groups]
        if self.separate_sampler:
            groups.append(tuple(sorted({*self["actor"].ranks, *self.sampler.ranks})))
        return sorted(set(groups))

    def table(self) -> list[str]:
        """Lines that show each role's ranks and parallelism, and what each rank computes in each phase."""
        rows = [("role", "ranks", "parallelism")]
        rows += [(name, in_words(role.ranks), role.parallelism) for name, role in self.roles.items()]
        held: dict[tuple[str, ...], list[int]] = {}
        for rank in sorted({rank for role in self.roles.values() for rank in role.ranks}):
            held.setdefault(tuple(name for name, role in self.roles.items() if rank in role.ranks), []).append(rank)
        sampler, trained = "sampler" if self.separate_sampler else "actor", ("actor", "critic")
        phases = [("ranks", "sampling", "scoring", "log-probs and values", "updates")]
        for names, ranks in held.items():
            mine = (
                [name for name in names if name == sampler],
                [name for name in names if name not in (*trained, "sampler")],
                [name for name in names if name in trained],
            )
            sampling, scoring, training = (", ".join(part) or "-" for part in mine)
            phases.append((in_words(ranks), sampling, scoring, training, training))
        return [f"placement: {self.style}", *_aligned(rows), *_aligned(phases)]


def in_words(ranks: Sequence[int]) -> str:
    """Ranks as ranges: 0-3,6."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def check_placement(given: str | Mapping[str, Any] | None) -> None:
    """Check the form of a placement, before the ranks are known.

    Raises:
        UserError: for an unknown style, or a role whose keys or ranks cannot be read.
    """
    if isinstance(given, str):
        styles = (*STYLES, AUTO)
        require(
            given in styles,
            f"placement must be one of {', '.join(styles)} or a mapping of roles, got {given}: the nearest is "
            f"{_nearest(given, styles)}",
        )
        return
    if is_automatic(given) or "adapt" in (given or {}):
        _check_automatic(given or {})
        return
    for role, keys in (given or {}).items():
        if role == "style":
            styles = (*STYLES, AUTO)
            require(keys in styles, f"placement.style must be one of {', '.join(styles)}, got {keys}: give one of them")
            continue
        require(
            isinstance(keys, Mapping) and bool(keys),
            f"placement.{role} must be a mapping with {', '.join(_KEYS)}, got {keys}: write for example "
            f"{{{role}: {{ranks: 0-3}}}}",
        )
        for key, value in keys.items():
            require(key in _KEYS, f"unknown key placement.{role}.{key}: the nearest is {_nearest(str(key), _KEYS)}")
            if key == "ranks":
                read_ranks(value, role)
            else:
                most = 3 if key == "zero" else _MOST_RANKS
                require(
                    isinstance(value, int) and not isinstance(value, bool) and (key == "zero") <= value + 1 <= most + 1,
                    f"placement.{role}.{key} must be a whole number of {0 if key == 'zero' else 1} or more, at most "
                    f"{most}, got {value}: give one",
                )


def is_automatic(given: str | Mapping[str, Any] | None) -> bool:
    """Whether the planner places the roles."""
    return AUTO in (given, given.get("style") if isinstance(given, Mapping) else None)


def adapts(given: str | Mapping[str, Any] | None) -> bool:
    """Whether a run moves to another placement where the planner expects to gain by it."""
    return isinstance(given, Mapping) and bool(given.get("adapt"))


def _check_automatic(given: Mapping[str, Any]) -> None:
    other = next((key for key in given if key not in ("style", "adapt")), None)
    adapt = given.get("adapt", False)
    require(
        given.get("style") == AUTO,
        f"placement.adapt needs the planner, got style {given.get('style')}: write {{style: auto, adapt: true}}",
    )
    require(isinstance(adapt, bool), f"placement.adapt must be true or false, got {adapt}: give one of them")
    require(
        other is None,
        f"placement.style auto chooses the ranks of all roles, got placement.{other}: leave it or the style out",
    )


def has_separate_sampler(given: str | Mapping[str, Any] | None) -> bool:
    """Whether a placement gives the sampler ranks of its own."""
    if isinstance(given, Mapping):
        return "sampler" in given or given.get("style") == "separation"
    return given == "separation"


def read_ranks(value: Any, role: str) -> tuple[int, ...]:
    """Ranks given as a number, a list, or ranges such as 0-3,6.

    Raises:
        UserError: for anything else, no rank, or one that is named twice.
    """
    parts = value if isinstance(value, Sequence) and not isinstance(value, str) else str(value).split(",")
    ranks: list[int] = []
    for part in parts:
        found = _RANGE.fullmatch(str(part).strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        require(
            first <= last < _MOST_RANKS,
            f"placement.{role}.ranks must be a list of ranks or ranges, got {value}: write for example 0-3",
        )
        ranks += range(first, last + 1)
    require(bool(ranks), f"placement.{role}.ranks must name a rank, got none: give some, or leave {role} out")
    require(
        len(set(ranks)) == len(ranks), f"placement.{role}.ranks must name each rank once, got {value}: leave one out"
    )
    return tuple(sorted(ranks))


def last_ranks(given: str | Mapping[str, Any] | None) -> dict[str, int]:
    """The highest rank that is named for each role."""
    roles = given if isinstance(given, Mapping) else {}
    return {
        name: read_ranks(keys["ranks"], name)[-1]
        for name, keys in roles.items()
        if isinstance(keys, Mapping) and "ranks" in keys
    }


def resolve_placement(given: str | Mapping[str, Any] | None, placed: PlacedRoles, *, ranks: int) -> Placement:
    """The placement of a run: what is given, and the rest filled in.

    Args:
        given: a style, roles with their ranks, or none for flattening.
        placed: the roles of the step.
        ranks: of the run.

    Raises:
        UserError: for a role that the step does not have, ranks that do not exist or must not be shared, or tensor
            parallelism that does not divide.
    """
    check_placement(given)
    roles = {} if given is None or isinstance(given, str) else {str(name): given[name] for name in given}
    style = (
        str(given)
        if isinstance(given, str)
        else str(roles.pop("style", "separation" if "sampler" in roles else "flattening"))
    )
    if "reward" in roles and "reward" not in placed.zero:  # all reward models
        shared = roles.pop("reward")
        roles = {name: shared for name in placed.rewards} | roles
        require(bool(placed.rewards), "placement.reward places reward models, the step has none: leave it out")
    names = (*placed.zero, "sampler")
    for name in roles:
        require(
            name in names,
            f"placement.{name} must be a role of the step, which has {', '.join(names)}: the nearest is "
            f"{_nearest(name, names)}",
        )
    own = {name: read_ranks(keys["ranks"], name) for name, keys in roles.items() if "ranks" in keys}
    for name, mine in own.items():
        require(
            mine[-1] < ranks,
            f"placement.{name}.ranks must be below the number of ranks, {ranks}, got {mine[-1]}: start more ranks or "
            "the missing hosts, or name others",
        )
    together = int(roles.get("sampler", {}).get("tensor_parallel", placed.tensor_parallel))
    filled = _filled(style, placed, own, ranks, together) | own
    placement = Placement(
        {
            name: RolePlacement(
                filled[name],
                cast(ZeroStage, roles.get(name, {}).get("zero", placed.zero.get(name, 0))),
                together if name == "sampler" or (name == "actor" and "sampler" not in filled) else 1,
            )
            for name in names
            if name in filled
        },
        "hybrid" if own else style,
    )
    _check(placement, placed, roles)
    return placement


def _filled(
    style: str, placed: PlacedRoles, own: Mapping[str, tuple[int, ...]], ranks: int, together: int
) -> dict[str, tuple[int, ...]]:
    """Ranks of the roles by a style, given those of some."""
    whole = tuple(range(ranks))
    require(
        style == "flattening" or ranks > 1 or bool(own),
        f"placement {style} needs 2 ranks or more, got {ranks}: start more, or give flattening",
    )
    sampler = own.get("sampler")
    if style == "separation" and sampler is None:
        # a whole number of tensor-parallel groups, on half of the ranks at most
        free = [rank for rank in whole if rank not in own.get("actor", ())]
        count = len(free) if "actor" in own else ranks // 2 // together * together
        require(
            0 < count < ranks and count % together == 0,
            f"placement separation needs {together} ranks for a tensor-parallel sampler beside the actor's, got "
            f"{ranks} ranks: start more, or name placement.sampler.ranks",
        )
        sampler = tuple(free[len(free) - count :])
    found = {} if sampler is None else {"sampler": sampler}
    training = own.get("actor", tuple(rank for rank in whole if rank not in (sampler or ())))
    require(bool(training), f"placement.actor needs ranks, placement.sampler takes all {ranks}: leave it some")
    found |= {name: training for name in placed.zero if name in ("actor", "critic")}
    beside = whole if sampler is None else sampler
    frozen = [name for name in placed.frozen if name not in own]
    parts = min(len(frozen), len(beside)) if style == "interleaving" else 1
    for place, name in enumerate(frozen):
        part = place % max(parts, 1)
        found[name] = beside[part * len(beside) // parts : (part + 1) * len(beside) // parts]
    return found


def _check(placement: Placement, placed: PlacedRoles, given: Mapping[str, Mapping[str, Any]]) -> None:
    sampler, actor = placement.sampler, placement["actor"]
    require(
        len(sampler.ranks) % sampler.tensor_parallel == 0,
        f"tensor parallelism must divide the sampler's {len(sampler.ranks)} ranks, got {sampler.tensor_parallel}: use "
        f"one of {', '.join(str(n) for n in range(1, len(sampler.ranks) + 1) if len(sampler.ranks) % n == 0)}",
    )
    for name, keys in given.items():
        require(
            "tensor_parallel" not in keys or name == "sampler",
            f"placement.{name} trains or scores without tensor parallelism, got tensor_parallel: leave it out, or give "
            "it to sampler",
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
    if not placement.separate_sampler:
        return
    shared = sorted({*sampler.ranks} & {*actor.ranks})
    require(
        not shared,
        f"placement.sampler has ranks of its own, got {in_words(shared)} of the actor's too: name others, or leave "
        "sampler out to sample on the actor's ranks",
    )
    if placed.policy_lag and "critic" in placement.roles:
        shared = sorted({*sampler.ranks} & {*placement["critic"].ranks})
        require(
            not shared,
            "rollout.async_sampling samples while the critic trains, got both on ranks "
            f"{in_words(shared)} in placement: name others for placement.critic",
        )


def _nearest(name: str, known: Sequence[str]) -> str:
    return get_close_matches(name, known, n=1, cutoff=0.0)[0]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
