"""Picks: functions that select a rank's part of a full weight, in the layout of the inference weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.generation.architecture.model_description import ModelDescription, Split

Pick = Callable[[Tensor], Tensor]
"""Selects this rank's part of a full weight or bias, as a view where possible."""


def adjacent_view(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that are adjacent in one storage as a single view; None if they are not adjacent."""
    first = parts[0]
    expected = first.data_ptr()
    for part in parts:
        if not (same_storage(part, first) and part.is_contiguous() and part.data_ptr() == expected):
            return None
        expected += part.nbytes
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def same_storage(first: Tensor, second: Tensor) -> bool:
    """True if two tensors share their storage."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def rows_of(part: range) -> Pick:
    """Pick a range of rows."""
    return lambda tensor: tensor[part.start : part.stop]


def columns_of(part: range) -> Pick:
    """Pick a range of columns."""
    return lambda tensor: tensor[:, part.start : part.stop]


def all_of(tensor: Tensor) -> Tensor:
    """Pick the whole tensor."""
    return tensor


def experts_of(part: range, *, transposed: bool, alternating: bool) -> Pick:
    """Pick some experts of weights [E, N, K], or [E, K, N] if transposed, or of biases [E, N]. Rows that alternate
    between gate and up are sorted, all of gate first."""

    def pick(tensor: Tensor) -> Tensor:
        some = tensor[part.start : part.stop]
        some = some.transpose(1, 2) if transposed else some
        return some.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if alternating else some

    return pick


def halves_of(heads: range, size: int, half: int) -> Pick:
    """Pick the first or second half of the rows of some heads, each with 2 * `size` rows; `half` is 0 or 1."""
    of_heads = rows_of(range(heads.start * 2 * size, heads.stop * 2 * size))
    return lambda tensor: of_heads(tensor).unflatten(0, (-1, 2, size))[:, half].flatten(0, 1)


def listed(rows: Tensor) -> Pick:
    """Pick rows in the order listed; a view if they are consecutive."""
    if bool((rows.diff() == 1).all()):
        return rows_of(range(int(rows[0]), int(rows[-1]) + 1))
    return lambda tensor: tensor[rows.to(tensor.device)]


def fused_qkv(architecture: ModelDescription, split: Split, *, whole: bool) -> Pick:
    """Pick a rank's rows of a fused QKV weight or bias: its Q, then its K, then its V. `whole`: it has all heads."""
    a, d = architecture, architecture.head_dim

    def pick(tensor: Tensor) -> Tensor:
        if a.qkv_order == "stacked" and whole:
            return tensor
        rest = tensor.shape[1:]
        if a.qkv_order == "stacked":
            q, k, v = tensor.reshape(-1, d, *rest).split([a.heads, a.kv_heads, a.kv_heads])
        else:
            groups = tensor.reshape(a.kv_heads, a.heads // a.kv_heads + 2, d, *rest)
            q = groups[:, :-2].reshape(a.heads, d, *rest)
            k = groups[:, -2]
            v = groups[:, -1]
        heads = slice(split.heads.start, split.heads.stop)
        kv = slice(split.kv_heads.start, split.kv_heads.stop)
        return torch.cat([q[heads], k[kv], v[kv]]).reshape(-1, *rest)

    return pick


def reordered(pick: Pick, order: Tensor) -> Pick:
    """Apply a pick, and put the rows of each head in another order [head size]."""

    def reorder(tensor: Tensor) -> Tensor:
        rows = pick(tensor)
        return rows.unflatten(0, (-1, len(order)))[:, order.to(rows.device)].flatten(0, 1)

    return reorder


@dataclass(frozen=True, eq=False)
class Scaled:
    """A pick from a weight or bias times a factor, or one factor per row, computed in the weight's dtype."""

    pick: Pick
    factor: float | Tensor

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the scaled tensor."""
        if isinstance(self.factor, Tensor):
            return self.pick(tensor * self.factor.to(tensor).view(-1, *[1] * (tensor.dim() - 1)))
        return self.pick(tensor * self.factor)


def after_transpose(pick: Pick) -> Pick:
    """Apply a pick to the transpose of a weight that is stored [in, out]."""
    return lambda tensor: pick(tensor.t())
