"""What differs between model families, for training and generation.

Read `family.py` (a row), `table.py` (one per family), `recurrent.py` (those of models with recurrent layers),
`layered.py` (those whose layers differ) and `experts.py` (mixtures of experts), then `training.py` (what training packs
and leaves out) and `head.py` (how logits are computed).
"""

from hybrid_rlhf.models.families.family import Family
from hybrid_rlhf.models.families.head import (
    HeadConvention,
    has_float32_logits,
    head_convention,
    keep_float32_logits,
)
from hybrid_rlhf.models.families.layered import LAYERED_FAMILIES
from hybrid_rlhf.models.families.recurrent import RECURRENT_FAMILIES
from hybrid_rlhf.models.families.table import FAMILIES as ATTENTION_FAMILIES
from hybrid_rlhf.models.families.training import PACKING_FAMILIES, WITHOUT_ADAPTERS, WITHOUT_ROUTER_LOSSES

FAMILIES: dict[str, Family] = {**ATTENTION_FAMILIES, **RECURRENT_FAMILIES, **LAYERED_FAMILIES}

__all__ = [
    "FAMILIES",
    "PACKING_FAMILIES",
    "WITHOUT_ADAPTERS",
    "WITHOUT_ROUTER_LOSSES",
    "Family",
    "HeadConvention",
    "has_float32_logits",
    "head_convention",
    "keep_float32_logits",
]
