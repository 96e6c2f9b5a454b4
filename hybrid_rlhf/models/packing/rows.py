"""The rows inside a packed row: their boundaries, as a mask for the layers, and padding for modules that mix tokens.

A row may continue another one, its prefix (prefixes.py): its tokens attend to those of the prefix and to their own.

transformers passes a 4D mask on unchanged, also when activation checkpointing runs a layer again in backward. ZeRO-3
passes a copy without attributes to layers that take the mask by position, so values contain all that attention needs.

Shapes: B rows, N real tokens of all rows, L tokens of the longest row, M keys of all rows.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.functional.operations import with_gradient

_BASE = 2**21
"""A token's value in a mask has the digits group, prefix + 1 (0: none) and row in this base."""
NO_PREFIX = -1


@dataclass(frozen=True)
class PaddedRows:
    """Rows of a packed row that are computed together, padded to the longest of them."""

    lengths: tuple[int, ...]
    longest: int
    places: Tensor
    """Index [n] of each token in the padded rows [rows * longest]."""
    tokens: Tensor
    """Token [rows * longest] at each padded index; padding repeats the row's last token, so that a NaN stays in its
    row."""
    padding: Tensor
    """Padded indices without a token."""
    keys: Tensor | None = None
    """Token [rows, keys] of the packed row at each key, if the rows continue prefixes: a prefix, padded on the left
    with its first token, then the row, padded as in `tokens`."""
    before: Tensor | None = None
    """[rows] number of padded keys before each prefix; None if there are none."""
    masks: dict[Any, Tensor | None] = field(default_factory=dict, compare=False)
    """Results of `mask`, which layers share."""

    @staticmethod
    def of(lengths: Sequence[int], *, device: torch.device | str) -> PaddedRows:
        """Rows with these lengths, in the order of the packed row."""
        sizes = torch.tensor(lengths)
        longest = max(lengths)
        time = torch.arange(longest)
        real = time < sizes[:, None]
        tokens = (sizes.cumsum(0) - sizes)[:, None] + torch.minimum(time, sizes[:, None] - 1)
        tokens.clamp_(min=0)  # for an empty first row
        flat = real.flatten()
        return PaddedRows(
            tuple(lengths),
            longest,
            flat.nonzero().squeeze(1).to(device),
            tokens.flatten().to(device),
            (~flat).nonzero().squeeze(1).to(device),
        )

    def pad(self, x: Tensor) -> Tensor:
        """Pad tokens [n, ...] to rows [rows, longest, ...]."""
        if len(self.padding):
            # the gradient of padding is 0, see unpad
            x = with_gradient(
                x, lambda x: x.index_select(0, self.tokens), lambda grad: grad.index_select(0, self.places)
            )
        return x.unflatten(0, (len(self.lengths), self.longest))

    def unpad(self, x: Tensor) -> Tensor:
        """The inverse of `pad`."""
        flat = x.flatten(0, 1)
        if not len(self.padding):
            return flat
        return with_gradient(
            flat,
            lambda x: x.index_select(0, self.places),
            lambda grad: grad.index_select(0, self.tokens).index_fill_(0, self.padding, 0.0),
        )

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """What is added to the scores, [L, keys] or [rows, 1, L, keys]: 0 where a query attends to a key; None if a
        causal mask is enough.

        Args:
            window: number of tokens that a query attends to, itself included; None: all tokens before it.
            like: a tensor with the dtype and device of the queries.
        """
        of = window, like.dtype
        if of not in self.masks:
            keys = self.longest if self.keys is None else self.keys.shape[1]
            self.masks[of] = None
            if self.keys is not None or (window is not None and window < keys):
                key = torch.arange(keys, device=like.device)
                distance = key[keys - self.longest :, None] - key
                seen = (distance >= 0) & (distance < (window or keys))
                if self.before is not None:
                    seen = (seen & (key >= self.before[:, None, None]))[:, None]
                self.masks[of] = torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, -torch.inf)
        return self.masks[of]


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [N, ...] at indices, [*index.shape, ...]. Gradients of an index that occurs several times are summed in float32
    or better."""
    flat, shape = index.flatten(), x.shape  # not x, which need not stay in memory

    def summed(grad: Tensor) -> Tensor:
        total = grad.new_zeros(shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        return total.index_add_(0, flat, grad.flatten(0, index.dim() - 1).to(total.dtype)).to(grad.dtype)

    return with_gradient(x, lambda x: x.index_select(0, flat).unflatten(0, index.shape), summed)


def places(
    lengths: Sequence[int], sizes: Sequence[int], *, device: torch.device | str = "cpu", prefixes: Sequence[int] = ()
) -> Tensor:
    """The row of each token, its prefix, and the group of each row, as a mask of attention: int64 [1, 1, 1, N], with
    the groups as an attribute.

    Args:
        lengths: lengths of the rows, in the order of the packed row.
        sizes: number of rows of each group.
        device: device of the mask.
        prefixes: the row that each row continues, NO_PREFIX for none; all rows of a group continue one, or none. Empty:
            no row does.
    """
    prefixes = prefixes or [NO_PREFIX] * len(lengths)
    of_rows = torch.tensor([place + (prefix + 1) * _BASE for place, prefix in enumerate(prefixes)])
    of_rows += torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * _BASE**2
    mask: Any = of_rows.repeat_interleave(torch.tensor(lengths)).to(device)[None, None, None]
    mask.groups = _groups(lengths, sizes, prefixes, device)
    return mask  # type: ignore[no-any-return]


def _groups(
    lengths: Sequence[int], sizes: Sequence[int], prefixes: Sequence[int], device: torch.device | str
) -> list[PaddedRows]:
    """The groups of `places`."""
    groups = []
    starts = [0, *itertools.accumulate(lengths)]
    first = 0
    for size in sizes:
        rows = range(first, first + size)
        group = PaddedRows.of([lengths[row] for row in rows], device=device)
        first += size
        if size and prefixes[rows[0]] != NO_PREFIX:
            begins = [starts[prefixes[row]] for row in rows]
            counts = torch.tensor([lengths[prefixes[row]] for row in rows])
            before = int(counts.max()) - counts
            place = torch.arange(int(counts.max())) - before[:, None]
            prefix = torch.tensor(begins)[:, None] + place.clamp(min=0)
            own = group.tokens.view(size, -1) + starts[rows[0]]
            group = replace(
                group,
                keys=torch.cat([prefix.to(device), own], dim=1),
                before=before.to(device) if bool(before.any()) else None,
            )
        groups.append(group)
    return groups


def boundaries(lengths: Tensor) -> Tensor:
    """Boundaries int32 [B + 1] of rows with lengths [B]."""
    return torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0)).to(torch.int32)


def ends(lengths: Tensor, prefixes: Sequence[int] = ()) -> Tensor:
    """Boundaries of rows with lengths [B] as a mask of a varlen kernel, with the longest length and the keys as
    attributes: int32 [1, 1, 1, B + 1], or, if some rows continue others, [1, 1, 2, B + 1] with their prefixes (see
    `places`)."""
    mask: Any = boundaries(lengths)[None, None, None]
    if prefixes:
        mask = torch.cat([mask, mask.new_tensor([*prefixes, NO_PREFIX])[None, None, None]], dim=2)
    mask.longest = int(lengths.max())
    VarlenKeys.of(mask)
    return mask  # type: ignore[no-any-return]


@dataclass(frozen=True)
class VarlenKeys:
    """Keys of rows that may continue prefixes, for a varlen kernel."""

    tokens: Tensor
    """[M] token of the packed row at each key, row by row."""
    ends: Tensor
    """[B + 1] int32, boundaries of the rows."""
    longest: int

    @staticmethod
    def of(mask: Any) -> VarlenKeys | None:
        """The keys of a mask of `ends`; None if no row continues another. They are cached on the mask."""
        if mask.shape[2] == 1:
            return None
        known: VarlenKeys | None = getattr(mask, "keys", None)
        if known is None:
            starts, prefixes = mask[0, 0].tolist()
            keys = []
            for place, prefix in enumerate(prefixes[:-1]):
                spans = [place] if prefix == NO_PREFIX else [prefix, place]
                keys.append(torch.cat([torch.arange(*starts[row : row + 2]) for row in spans]))
            counts = torch.tensor([len(of_row) for of_row in keys], device=mask.device)
            known = mask.keys = VarlenKeys(torch.cat(keys).to(mask.device), boundaries(counts), int(counts.max()))
        return known


def groups_of(mask: Tensor) -> list[PaddedRows]:
    """The groups of `places`."""
    known: list[PaddedRows] | None = getattr(mask, "groups", None)
    return _decoded(tuple(mask.flatten().tolist()), mask.device) if known is None else known


def rows_of(mask: Any) -> PaddedRows:
    """All rows of `places` or `ends` as one group, without rows that have no token; cached on the mask."""
    known: PaddedRows | None = getattr(mask, "rows", None)
    if known is None:
        if mask.dtype == torch.int32:
            lengths = mask[0, 0, 0].diff().tolist()
        else:
            lengths = [length for group in groups_of(mask) for length in group.lengths]
        known = mask.rows = PaddedRows.of([length for length in lengths if length], device=mask.device)
    return known


def is_packed(mask: Tensor | None) -> bool:
    """Return True for a mask of `places` or `ends`, False for a mask of padded rows."""
    return mask is not None and mask.dim() == 4 and mask.dtype in (torch.int32, torch.int64)


@functools.lru_cache(maxsize=4)
def _decoded(codes: tuple[int, ...], device: torch.device) -> list[PaddedRows]:
    """The groups of a mask's values; rows without a token are left out."""
    rows = Counter(codes)
    place_of = {code % _BASE: place for place, code in enumerate(rows)} | {NO_PREFIX: NO_PREFIX}
    prefixes = [place_of[code // _BASE % _BASE - 1] for code in rows]
    return _groups([*rows.values()], [*Counter(code // _BASE**2 for code in rows).values()], prefixes, device)
