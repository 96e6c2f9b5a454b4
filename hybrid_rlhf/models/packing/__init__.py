"""Packing: the rows of a batch pass through a model as one row of real tokens.

Completions end early, so a padded batch is half padding, and everything except attention costs as much for padding as
for text.

Read `batches.py` (which models pack, a batch as a packed row), `prefixes.py` (rows that begin alike), `rows.py` (the
boundaries of rows as a mask, and padding for the layers that mix tokens), `attention.py` and `mixers.py` (these
layers), `sequence.py` (rows that several ranks compute together).
"""

from hybrid_rlhf.models.packing.attention import (
    PACKED_ATTENTION,
    rows_world,
    set_sequence_world,
    set_tensor_world,
    tensor_world,
)
from hybrid_rlhf.models.packing.batches import (
    PackedBatch,
    layer_masks,
    pack,
    pack_parts,
    packs,
    pads,
    saved_rows,
    shares_prefixes,
    use_packing,
    why_padded,
    why_separate,
)
from hybrid_rlhf.models.packing.rows import NO_PREFIX, places, take
from hybrid_rlhf.models.packing.sequence import (
    SequenceShard,
    require_sequence_parallelism,
    require_tensor_parallelism,
    shard_rows,
    with_summed_gradient,
)

__all__ = [
    "NO_PREFIX",
    "PACKED_ATTENTION",
    "PackedBatch",
    "SequenceShard",
    "layer_masks",
    "pack",
    "pack_parts",
    "packs",
    "pads",
    "places",
    "require_sequence_parallelism",
    "require_tensor_parallelism",
    "rows_world",
    "saved_rows",
    "set_sequence_world",
    "set_tensor_world",
    "shard_rows",
    "shares_prefixes",
    "take",
    "tensor_world",
    "use_packing",
    "why_padded",
    "why_separate",
    "with_summed_gradient",
]
