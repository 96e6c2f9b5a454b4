"""The part of a model that each tensor-parallel rank computes: heads, units of the MLP, rows of the vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.architecture.model_description import ModelDescription


@dataclass(frozen=True)
class Split:
    """The part of a model that one tensor-parallel rank computes."""

    heads: range
    kv_heads: range
    kv_heads_of: tuple[tuple[int, ...], ...]
    """For each kind of attention, the KV heads of this rank."""
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
        """Return the part of a rank: whole KV heads if there are enough, else each KV head on several ranks.

        Raises:
            UserError: when the heads cannot be split.
        """
        queries, kv = _share_heads(architecture.heads, architecture.kv_heads, rank, size)
        counts = [architecture.kv_size(kind)[0] for kind in range(len(architecture.kinds))]
        _require_same_heads(architecture.heads, {architecture.kv_heads, *counts}, size)
        experts = architecture.experts
        units = architecture.recurrence.units if architecture.recurrence else 0
        if 0 < units < size:
            raise UserError(
                f"tensor parallelism must give each rank whole groups of heads of recurrent layers, {size} ranks are "
                f"more than the {units} of this model: use {units} or fewer"
            )
        return cls(
            queries,
            kv,
            tuple(tuple(_share_heads(architecture.heads, count, rank, size)[1]) for count in counts),
            share(architecture.mlp_size, rank, size),
            share(architecture.vocab_size, rank, size),
            share(experts.count if experts else 0, rank, size),
            share(experts.shared_size if experts else 0, rank, size),
            share(units, rank, size),
        )


def _share_heads(heads: int, kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """Return the heads and the KV heads of a rank."""
    per_kv = heads // kv_heads
    if size <= kv_heads:
        kv = share(kv_heads, rank, size)
        return range(kv.start * per_kv, kv.stop * per_kv), kv
    if size % kv_heads == 0 and heads % size == 0:
        return share(heads, rank, size), range(rank * kv_heads // size, rank * kv_heads // size + 1)
    raise UserError(
        f"tensor parallelism must split {heads} heads with {kv_heads} KV heads, {size} ranks cannot: "
        f"use {kv_heads} ranks or fewer"
    )


def _require_same_heads(heads: int, counts: set[int], size: int) -> None:
    """Raise UserError unless each rank has the same heads with every number of KV heads."""
    for rank in range(size):
        if len({_share_heads(heads, count, rank, size)[0] for count in counts}) > 1:
            raise UserError(
                f"tensor parallelism must give a rank the same heads in all layers, {size} ranks do not with "
                f"{' and '.join(map(str, sorted(counts)))} KV heads: use a divisor of {math.gcd(*counts)}"
            )


def share(total: int, rank: int, size: int) -> range:
    """Return a rank's contiguous share of `total` items; shares differ by at most one item."""
    return range(total * rank // size, total * (rank + 1) // size)
