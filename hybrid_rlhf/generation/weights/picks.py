"""Parts of a full weight that a rank needs, in the layout in which it needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.generation.architecture.model_description import ModelDescription
from hybrid_rlhf.generation.architecture.split import Split

Pick = Callable[[Tensor], Tensor]
"""Selects this rank's part of a full weight or bias, as a view where possible."""


def adjacent_view(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors that are adjacent in one storage as a single tensor, without a copy; none where they are not."""
    first = parts[0]
    expected = first.data_ptr()
    for part in parts:
        if not (same_storage(part, first) and part.is_contiguous() and part.data_ptr() == expected):
            return None
        expected += part.nbytes
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether one is a view of what the other is a view of."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def rows_of(part: range) -> Pick:
    """Some rows."""
    return lambda tensor: tensor[part.start : part.stop]


def columns_of(part: range) -> Pick:
    """Some columns."""
    return lambda tensor: tensor[:, part.start : part.stop]


def all_of(tensor: Tensor) -> Tensor:
    """The whole."""
    return tensor


def experts_of(part: range, *, transposed: bool, alternating: bool) -> Pick:
    """Some experts of weights [E, N, K], or [E, K, N] if transposed, and of biases [E, N]. Rows that alternate between
    gate and up are sorted."""

    def pick(tensor: Tensor) -> Tensor:
        some = tensor[part.start : part.stop]
        some = some.transpose(1, 2) if transposed else some
        return some.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if alternating else some

    return pick


def halves_of(heads: range, size: int, half: int) -> Pick:
    """Of each of some heads, which have 2 * `size` rows, the first half or the second."""
    each = rows_of(range(heads.start * 2 * size, heads.stop * 2 * size))
    return lambda tensor: each(tensor).unflatten(0, (-1, 2, size))[:, half].flatten(0, 1)


def listed(rows: Tensor) -> Pick:
    """Rows in a given order; a view where they are consecutive."""
    if bool((rows.diff() == 1).all()):
        return rows_of(range(int(rows[0]), int(rows[-1]) + 1))
    return lambda tensor: tensor[rows.to(tensor.device)]


def fused_qkv(architecture: ModelDescription, split: Split, *, whole: bool) -> Pick:
    """A rank's rows of a fused weight or bias: its Q, then its K, then its V. `whole`: it has all heads."""
    a, d = architecture, architecture.head_dim

    def pick(tensor: Tensor) -> Tensor:
        if a.qkv_order == "stacked" and whole:
            return tensor
        rest = tensor.shape[1:]
        if a.qkv_order == "stacked":
            q, k, v = tensor.reshape(-1, d, *rest).split([a.heads, a.kv_heads, a.kv_heads])
        else:
            groups = tensor.reshape(a.kv_heads, a.heads // a.kv_heads + 2, d, *rest)
            q, k, v = groups[:, :-2].reshape(a.heads, d, *rest), groups[:, -2], groups[:, -1]
        heads, kv = slice(split.heads.start, split.heads.stop), slice(split.kv_heads.start, split.kv_heads.stop)
        return torch.cat([q[heads], k[kv], v[kv]]).reshape(-1, *rest)

    return pick


def reordered(pick: Pick, order: Tensor) -> Pick:
    """The rows of each head in another order [size of a head]."""

    def reorder(tensor: Tensor) -> Tensor:
        rows = pick(tensor)
        return rows.unflatten(0, (-1, len(order)))[:, order.to(rows.device)].flatten(0, 1)

    return reorder


@dataclass(frozen=True, eq=False)
class Scaled:
    """From the weight or bias times a factor, which may be one for each row: computed, in the weight's dtype."""

    pick: Pick
    factor: float | Tensor

    def __call__(self, tensor: Tensor) -> Tensor:
        """See Pick."""
        if isinstance(self.factor, Tensor):
            return self.pick(tensor * self.factor.to(tensor).view(-1, *[1] * (tensor.dim() - 1)))
        return self.pick(tensor * self.factor)


def after_transpose(pick: Pick) -> Pick:
    """From a weight that is stored [in, out]."""
    return lambda tensor: pick(tensor.t())
