"""What differs between model families, for training and generation.

Read `table.py` (one row per family) and `experts.py` (its mixture of experts), then `training.py` (what training packs
and leaves out) and `head.py` (how logits are computed).
"""

from hybrid_rlhf.models.families.head import (
    HeadConvention,
    has_float32_logits,
    head_convention,
    keep_float32_logits,
)
from hybrid_rlhf.models.families.table import FAMILIES, Family
from hybrid_rlhf.models.families.training import PACKING_FAMILIES, WITHOUT_ADAPTERS, WITHOUT_ROUTER_LOSSES

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
