"""The KV cache: one slot per running completion, contiguous memory for the longest sequence.

Why slots and not pages: the longest sequence of a rollout is known before it starts, so slots can have its size.
Attention reads contiguous rows in place, without a block table, and a batch of live rows is a view. The price is memory
for tokens that are never sampled; a request waits until a slot is free.

Shapes: L layers, S slots, K KV heads of this rank, C token capacity of a slot, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid_rlhf.generation.weights.description import ModelDescription
from hybrid_rlhf.generation.weights.split import Split


class KVCache:
    """Keys and values [L, S, K, C, D]."""

    def __init__(
        self,
        architecture: ModelDescription,
        split: Split,
        *,
        slots: int,
        capacity_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (architecture.layers, slots, len(split.kv_heads), capacity_tokens, architecture.head_dim)
        # Zeros, not uninitialised memory: an attention weight of 0 times NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.keys.shape[1]

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit in one slot."""
        return self.keys.shape[3]

    def copy(self, source: int, targets: Sequence[int], tokens: int) -> None:
        """Copy the first tokens of one slot to others."""
        for store in (self.keys, self.values):
            for target in targets:
                store[:, target, :, :tokens] = store[:, source, :, :tokens]


def bytes_per_token(architecture: ModelDescription, split: Split, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values on this rank."""
    return 2 * architecture.layers * len(split.kv_heads) * architecture.head_dim * dtype.itemsize
