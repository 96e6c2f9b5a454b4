"""The rows inside a packed row: their boundaries, as a mask for the layers, and padding for modules that mix tokens.

transformers passes a 4D mask on unchanged, also when activation checkpointing runs a layer again in backward.

Shapes: B rows, N real tokens of all rows, L tokens of the longest row.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.functional.operations import with_gradient

_GROUP = 2**32
"""Multiplier of the group in the values of a mask; the remainder is the row."""


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

    @staticmethod
    def of(lengths: Sequence[int], *, device: torch.device) -> PaddedRows:
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


def places(lengths: Sequence[int], sizes: Sequence[int], *, device: torch.device) -> Tensor:
    """The row of each token and the group of each row, as a mask of attention: int64 [1, 1, 1, N], with the groups as
    an attribute.

    Args:
        lengths: lengths of the rows, in the order of the packed row.
        sizes: number of rows of each group.
        device: device of the tokens.
    """
    groups = []
    start = 0
    for size in sizes:
        groups.append(PaddedRows.of(lengths[start : start + size], device=device))
        start += size
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    group_of_row = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    mask: Any = (group_of_row[rows] * _GROUP + rows).to(device)[None, None, None]
    mask.groups = groups
    return mask  # type: ignore[no-any-return]


def boundaries(lengths: Tensor) -> Tensor:
    """Boundaries int32 [B + 1] of rows with lengths [B]."""
    return torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0)).to(torch.int32)


def ends(lengths: Tensor) -> Tensor:
    """Boundaries of rows with lengths [B] as a mask of a varlen kernel: int32 [1, 1, 1, B + 1], with the longest length
    as an attribute."""
    mask: Any = boundaries(lengths)[None, None, None]
    mask.longest = int(lengths.max())
    return mask  # type: ignore[no-any-return]


def groups_of(mask: Tensor) -> list[PaddedRows]:
    """The groups of `places`. ZeRO-3 passes a copy without the attribute to layers that take the mask by position."""
    known: list[PaddedRows] | None = getattr(mask, "groups", None)
    return _decoded(tuple(mask.flatten().tolist()), mask.device) if known is None else known


def rows_of(mask: Any) -> PaddedRows:
    """All rows of `places` or `ends` as one group, without rows that have no token; cached on the mask."""
    known: PaddedRows | None = getattr(mask, "rows", None)
    if known is None:
        if mask.dtype == torch.int32:
            lengths = mask.flatten().diff().tolist()
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
    by_group = itertools.groupby(rows, key=lambda code: code // _GROUP)
    return [PaddedRows.of([rows[code] for code in codes_of_group], device=device) for _, codes_of_group in by_group]
