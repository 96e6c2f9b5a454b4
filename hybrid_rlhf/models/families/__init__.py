"""Differences between model families, for training and generation.

Read `family.py` (the fields of a row), `table.py` (one row per family), `recurrent.py` (rows of models with recurrent
layers), `layered.py` (rows of models whose layers differ), `experts.py` (mixtures of experts) and `lookup.py` (the row
of a model), then `training.py` (model types that training packs or restricts) and `head.py` (how logits are computed).
"""

from hybrid_rlhf.models.families.family import Family
from hybrid_rlhf.models.families.head import (
    HeadConvention,
    has_float32_logits,
    head_convention,
    keep_float32_logits,
)
from hybrid_rlhf.models.families.lookup import FAMILIES, family_of, has_mixers, unread_weights
from hybrid_rlhf.models.families.training import (
    PACKING_FAMILIES,
    TOWER_FAMILIES,
    WITHOUT_ADAPTERS,
    WITHOUT_ROUTER_LOSSES,
)

__all__ = [
    "FAMILIES",
    "PACKING_FAMILIES",
    "TOWER_FAMILIES",
    "WITHOUT_ADAPTERS",
    "WITHOUT_ROUTER_LOSSES",
    "Family",
    "HeadConvention",
    "family_of",
    "has_float32_logits",
    "has_mixers",
    "head_convention",
    "keep_float32_logits",
    "unread_weights",
]
