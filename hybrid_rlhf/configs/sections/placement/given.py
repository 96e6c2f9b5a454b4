"""A placement as the user gives it: its form, checked before the ranks of the run are known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rlhf.configs.sections.rules import nearest_hint, require

STYLES = ("flattening", "interleaving", "separation")
AUTO = "auto"
"""The planner chooses (planning/automatic.py)."""
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_KEYS = ("ranks", "zero", "tensor_parallel", "with_actor")
_MOST_RANKS = 2**16


def check_placement(given: str | Mapping[str, Any] | None) -> None:
    """Check the form of a placement, before the ranks are known.

    Raises:
        UserError: for an unknown style, or a role whose keys or ranks cannot be read.
    """
    styles = (*STYLES, AUTO)
    if isinstance(given, str):
        require(
            given in styles,
            f"placement must be one of {', '.join(styles)} or a mapping of roles, got {given}: "
            f"{nearest_hint(given, styles, otherwise='give one of them')}",
        )
        return
    if is_automatic(given) or "adapt" in (given or {}):
        _check_automatic(given or {})
        return
    for role, keys in (given or {}).items():
        if role == "style":
            require(keys in styles, f"placement.style must be one of {', '.join(styles)}, got {keys}: give one of them")
            continue
        known = ", ".join(_KEYS if role == "sampler" else _KEYS[:-1])
        require(
            isinstance(keys, Mapping) and bool(keys),
            f"placement.{role} must be a mapping with {known}, got {keys}: write for example "
            f"{{{role}: {{ranks: 0-3}}}}",
        )
        for key, value in keys.items():
            hint = nearest_hint(str(key), _KEYS, otherwise=f"a role has {known}")
            require(key in _KEYS, f"unknown key placement.{role}.{key}: {hint}")
            if key == "ranks":
                read_ranks(value, role)
            elif key == "with_actor":
                require(
                    role == "sampler" and isinstance(value, bool),
                    f"placement.sampler.with_actor must be true or false, got placement.{role}.with_actor {value}: "
                    "give one to sampler, or leave it out",
                )
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
