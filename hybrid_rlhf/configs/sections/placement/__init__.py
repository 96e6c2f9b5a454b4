"""Where each role of an RL step lives: ranks and parallelism.

Read `given.py` (what the user writes), `resolving.py` (what it means on the ranks of a run) and `roles.py`.

Source: flattening, interleaving and separation, arXiv 2312.11819 (FlexRLHF). Deviation: ranks are named, never
fractions of their number, so that a placement says where each role is.
"""

from hybrid_rlhf.configs.sections.placement.given import (
    AUTO,
    STYLES,
    check_placement,
    has_separate_sampler,
    is_automatic,
    last_ranks,
)
from hybrid_rlhf.configs.sections.placement.resolving import resolve_placement
from hybrid_rlhf.configs.sections.placement.roles import (
    CRITIC_COPY,
    READS_ACTOR,
    PlacedRoles,
    Placement,
    RolePlacement,
    ZeroStage,
    aligned,
    in_words,
    role_label,
)

__all__ = [
    "AUTO",
    "CRITIC_COPY",
    "READS_ACTOR",
    "STYLES",
    "PlacedRoles",
    "Placement",
    "RolePlacement",
    "ZeroStage",
    "aligned",
    "check_placement",
    "has_separate_sampler",
    "in_words",
    "is_automatic",
    "last_ranks",
    "resolve_placement",
    "role_label",
]
