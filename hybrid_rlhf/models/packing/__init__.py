"""Packing: the rows of a batch pass through a model as one row of real tokens.

Completions end early, so a padded batch is half padding, and everything except attention costs as much for padding as
for text.

Read `batches.py` (which models pack, a batch as a packed row), `rows.py` (the boundaries of rows as a mask, and padding
for the layers that mix tokens), `attention.py` and `mixers.py` (these layers), `sequence.py` (rows that several ranks
compute together).
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
    use_packing,
    why_padded,
)
from hybrid_rlhf.models.packing.rows import places
from hybrid_rlhf.models.packing.sequence import (
    SequenceShard,
    require_sequence_parallelism,
    require_tensor_parallelism,
    shard_rows,
    with_summed_gradient,
)

__all__ = [
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
    "set_sequence_world",
    "set_tensor_world",
    "shard_rows",
    "tensor_world",
    "use_packing",
    "why_padded",
    "with_summed_gradient",
]
