"""The KV cache: a slot for each completion under way, each slot a stretch of memory for its longest length.

Why slots and not pages: what a rollout may ask for is known before it starts, so a slot can be sized for it; rows
that are contiguous are read by attention in place, without a table, and a batch of live rows is a view. The price is
memory for tokens that are not sampled; a request waits until a slot is free.

Shapes: L layers, S slots, K KV heads of this rank, C tokens of a slot, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid_rlhf.generation.architecture import Architecture
from hybrid_rlhf.generation.split import Split


class KVCache:
    """Keys and values [L, S, K, C, D]."""

    def __init__(
        self,
        architecture: Architecture,
        split: Split,
        *,
        slots: int,
        capacity_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (architecture.layers, slots, len(split.kv_heads), capacity_tokens, architecture.head_dim)
        # Zeros, not whatever lies there: a weight of 0 on a value that is NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    @property
    def slots(self) -> int:
        """How many."""
        return self.keys.shape[1]

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into a slot."""
        return self.keys.shape[3]

    def copy(self, source: int, targets: Sequence[int], tokens: int) -> None:
        """Give slots the first tokens of another."""
        for store in (self.keys, self.values):
            for target in targets:
                store[:, target, :, :tokens] = store[:, source, :, :tokens]


def bytes_per_token(architecture: Architecture, split: Split, dtype: torch.dtype) -> int:
    """What a token takes in a cache."""
    return 2 * architecture.layers * len(split.kv_heads) * architecture.head_dim * dtype.itemsize
