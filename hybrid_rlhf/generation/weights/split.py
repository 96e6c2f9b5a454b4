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
    kv_heads_of: tuple[tuple[int, ...], ...]
    """For each kind of attention, the KV heads that are cached. A kind whose keys are narrower than those of others
    has each of its heads several times, so that all kinds fill the cache alike."""
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
        queries, kv = _share_heads(architecture.heads, architecture.kv_heads, rank, size)
        width = len(kv) * architecture.head_dim
        each = tuple(_fill(architecture, kind, width, rank, size) for kind in range(len(architecture.kinds)))
        experts, units = architecture.experts, architecture.recurrence.units if architecture.recurrence else 0
        if 0 < units < size:
            raise UserError(
                f"tensor parallelism must give each rank whole groups of heads of recurrent layers, {size} ranks are "
                f"more than the {units} of this model: use {units} or fewer"
            )
        return cls(
            queries,
            kv,
            each,
            share(architecture.mlp_size, rank, size),
            share(architecture.vocab_size, rank, size),
            share(experts.count if experts else 0, rank, size),
            share(experts.shared_size if experts else 0, rank, size),
            share(units, rank, size),
        )


def _share_heads(heads: int, kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """Heads and KV heads of a rank."""
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


def _fill(architecture: ModelDescription, kind: int, width: int, rank: int, size: int) -> tuple[int, ...]:
    """KV heads of a kind of attention that fill the cache of a rank, which has `width` dimensions for a token."""
    kv_heads, head_dim = architecture.kv_size(kind)
    queries, own = _share_heads(architecture.heads, kv_heads, rank, size)
    copies, rest = divmod(width, len(own) * head_dim)
    if rest or not copies or len(queries) // len(own) % copies:
        raise UserError(
            f"tensor parallelism must give layers of all kinds keys of the same size, with {size} ranks a layer has "
            f"{len(own)} heads of {head_dim} dimensions and another {width} dimensions in all: use fewer ranks"
        )
    return tuple(head for head in own for _ in range(copies))


def share(total: int, rank: int, size: int) -> range:
    """A rank's contiguous share of `total` items; shares differ by one item at most."""
    return range(total * rank // size, total * (rank + 1) // size)
