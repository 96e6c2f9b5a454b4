"""Which part of a model each tensor-parallel rank computes: heads, units of the MLP, rows of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.weights.description import ModelDescription


@dataclass(frozen=True)
class Split:
    """The part of a model that one tensor-parallel rank computes."""

    heads: range
    kv_heads: range
    mlp: range
    vocabulary: range
    experts: range = range(0)
    """Routed experts; each is on one rank."""
    shared_mlp: range = range(0)
    """Units of the shared experts."""
    recurrent: range = range(0)
    """Units of the recurrent layers."""

    @classmethod
    def of(cls, architecture: ModelDescription, rank: int, size: int) -> Split:
        """The part of a rank: full KV heads where there are enough, else each KV head on several ranks.

        Raises:
            UserError: when the heads cannot be split.
        """
        heads, kv_heads = architecture.heads, architecture.kv_heads
        per_kv = heads // kv_heads
        if size <= kv_heads:
            kv = share(kv_heads, rank, size)
            queries = range(kv.start * per_kv, kv.stop * per_kv)
        elif size % kv_heads == 0 and heads % size == 0:
            kv = range(rank * kv_heads // size, rank * kv_heads // size + 1)
            queries = share(heads, rank, size)
        else:
            raise UserError(
                f"tensor parallelism must split {heads} heads with {kv_heads} KV heads, {size} ranks cannot: "
                f"use {kv_heads} ranks or fewer"
            )
        experts, units = architecture.experts, architecture.recurrence.units if architecture.recurrence else 0
        if 0 < units < size:
            raise UserError(
                f"tensor parallelism must give each rank whole groups of heads of recurrent layers, {size} ranks are "
                f"more than the {units} of this model: use {units} or fewer"
            )
        return cls(
            queries,
            kv,
            share(architecture.mlp_size, rank, size),
            share(architecture.vocab_size, rank, size),
            share(experts.count if experts else 0, rank, size),
            share(experts.shared_size if experts else 0, rank, size),
            share(units, rank, size),
        )


def share(total: int, rank: int, size: int) -> range:
    """A rank's contiguous share of `total` items; shares differ by one item at most."""
    return range(total * rank // size, total * (rank + 1) // size)
