"""Where the roles of RL live: the ranks of each, and how it is divided over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RolePlacement:
    """The ranks of one role."""

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    zero: int = 0
    """ZeRO stage."""
    tensor_parallel: int = 1
    """Ranks that share one copy of the inference weights."""


@dataclass(frozen=True)
class Placement:
    """The ranks of all roles."""

    roles: Mapping[str, RolePlacement]
    """actor, critic, reference, names of reward components; sampler only where it is separate from the actor."""
    style: str
    """flattening, interleaving, separation or hybrid."""
