"""Settings of the placement of roles in an RL step: a style, ranks by role, or the planner's choice.

Source: flattening, interleaving and separation, arXiv 2312.11819 (FlexRLHF). Deviation: ranks are named and not given
as fractions, so that a placement shows where each role is. runtime/placement.py applies it to the ranks of a run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hybrid_rlhf.configs.sections.rules import nearest_hint, require

Style = Literal["flattening", "interleaving", "separation"]
ZeroStage = Literal[0, 1, 2, 3]
STYLES: tuple[Style, ...] = get_args(Style)
ROLES = ("actor", "critic", "critic_copy", "reference", "teacher", "sampler")
"""Names of the roles of a step besides its reward models."""
TEACHER_PREFIX = "teacher."
"""Begin of the names of further teachers, by a value of teacher.per_source."""
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_KEYS = ("ranks", "zero", "tensor_parallel")
_INFERENCE = ("sampler", "critic_copy")
"""Roles that have inference weights only."""
_RETIRED = {"with_actor": "a sampler samples alone, and without ranks of its own on the actor's: leave one out"}
_MOST_RANKS = 2**16


def is_role(name: str) -> bool:
    """True for the name of a role, false for that of a reward model."""
    return name in ROLES or name.startswith(TEACHER_PREFIX)


@dataclass(frozen=True)
class RoleRanks:
    """Settings of a role."""

    ranks: tuple[int, ...] | None = None
    """Ascending; None for the ranks of the style."""
    zero: ZeroStage | None = None
    """ZeRO stage; None for that of the role's section."""
    tensor_parallel: int | None = None
    """Ranks that share the inference weights of the sampler or of the critic's copy; None: rollout.tensor_parallel for
    the sampler, 1 for the copy."""

    def as_given(self) -> dict[str, Any]:
        """The form of config files."""
        given = {key: value for key, value in vars(self).items() if value is not None}
        return given if self.ranks is None else {**given, "ranks": in_words(self.ranks)}


@dataclass(frozen=True)
class RolePlacements:
    """The value of the key `placement`: a style, and the ranks of some roles."""

    style: Style | Literal["auto"]
    """auto: the planner chooses the ranks of all roles (planning/automatic.py)."""
    roles: Mapping[str, RoleRanks] = field(default_factory=dict)
    """By role: one of ROLES (teacher: all teachers), reward (all reward models), or a reward model's name."""

    def as_given(self) -> str | dict[str, Any]:
        """Return the value in the form of config files."""
        roles = {name: role.as_given() for name, role in self.roles.items()}
        if not roles:
            return self.style
        return roles if self.style == _style_beside(roles) else {"style": self.style, **roles}


PlacementConfig = RolePlacements


def read_placement(given: str | dict[str, Any] | None) -> RolePlacements | None:
    """The placement from the value in a file or on the command line: a style, or roles with an optional style.

    Raises:
        UserError: for an unknown style, or a role whose keys or ranks cannot be read.
    """
    if given is None:
        return None
    content = {str(name): keys for name, keys in given.items()} if isinstance(given, dict) else {"style": given}
    style: Any = content.pop("style", _style_beside(content))
    styles = (*STYLES, "auto")
    key, roles_too = ("placement.style", "") if isinstance(given, dict) else ("placement", " or a mapping of roles")
    require(
        style in styles,
        f"{key} must be one of {', '.join(styles)}{roles_too}, got {style}: "
        f"{nearest_hint(str(style), styles, otherwise='give one of them')}",
    )
    require(
        style != "auto" or not content,
        f"placement.style auto chooses the ranks of all roles, got placement.{next(iter(content), None)}: leave it "
        "or the style out",
    )
    return RolePlacements(style, {name: _read_role(name, keys) for name, keys in content.items()})


def _style_beside(roles: Mapping[str, Any]) -> Style:
    """The style of a mapping of roles that names none."""
    return "separation" if "sampler" in roles else "flattening"


def _read_role(role: str, keys: Any) -> RoleRanks:
    known = ", ".join(_KEYS)
    require(
        isinstance(keys, Mapping) and keys,
        f"placement.{role} must be a mapping with {known}, got {keys}: write for example {{{role}: {{ranks: 0-3}}}}",
    )
    for key in keys:
        hint = _RETIRED.get(key) or nearest_hint(str(key), _KEYS, otherwise=f"a role has {known}")
        require(key in _KEYS, f"unknown key placement.{role}.{key}: {hint}")
    for key, least, most in (("zero", 0, 3), ("tensor_parallel", 1, _MOST_RANKS)):
        value = keys.get(key, least)
        require(
            type(value) is int and least <= value <= most,
            f"placement.{role}.{key} must be a whole number of {least} or more, at most {most}, got {value}: give one",
        )
    together = keys.get("tensor_parallel")
    require(
        together is None or role in _INFERENCE,
        f"placement.{role}.tensor_parallel splits inference weights, which {' and '.join(_INFERENCE)} have, got "
        f"{together}: leave it out; zero 3, and for frozen models rollout.offload_frozen, save memory too",
    )
    require(
        not keys.get("zero") or role not in _INFERENCE,
        f"placement.{role} has inference weights, which ZeRO does not shard, got zero {keys.get('zero')}: give "
        "tensor_parallel, or leave it out",
    )
    return RoleRanks(**{**keys, "ranks": read_ranks(keys["ranks"], role)} if "ranks" in keys else keys)


def read_ranks(value: Any, role: str) -> tuple[int, ...]:
    """Ranks from a number, a list, or ranges such as 0-3,6.

    Raises:
        UserError: for any other value, for no rank, or for a rank that occurs twice.
    """
    parts = value if isinstance(value, Sequence) and not isinstance(value, str) else str(value).split(",")
    ranks: list[int] = []
    for part in parts:
        match = _RANGE.fullmatch(str(part).strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        require(
            first <= last < _MOST_RANKS,
            f"placement.{role}.ranks must be a list of ranks or ranges, got {value}: write for example 0-3",
        )
        ranks += range(first, last + 1)
    require(ranks, f"placement.{role}.ranks must name a rank, got none: give some, or leave {role} out")
    require(
        len(set(ranks)) == len(ranks), f"placement.{role}.ranks must name each rank once, got {value}: leave one out"
    )
    return tuple(sorted(ranks))


def in_words(ranks: Sequence[int]) -> str:
    """Ranks as ranges: 0-3,6."""
    runs = itertools.groupby(enumerate(ranks), lambda item: item[1] - item[0])
    parts = [[rank for _, rank in run] for _, run in runs]
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def is_automatic(placement: RolePlacements | None) -> bool:
    """Return True if the planner places the roles."""
    return placement is not None and placement.style == "auto"


def has_separate_sampler(placement: RolePlacements | None) -> bool:
    """Return True if a placement gives the sampler separate ranks."""
    return placement is not None and (placement.style == "separation" or "sampler" in placement.roles)
