"""Parts of a flattened weight as evenly spaced runs, and the part of a weight that a tensor-parallel rank needs.

Why runs: a ZeRO-3 rank has an interval of a weight, a tensor-parallel rank needs rows or columns of it. Columns of a
weight are thousands of intervals but one `Runs`. So is the intersection of columns with an interval, except at its
ends.

How a part is determined: the loader's picks (generation/weights/picks.py) are functions of the full weight. Most return
a view of a meta tensor, and its offset, size and stride give the part. For other picks, the part is the elements with a
nonzero gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from hybrid_rlhf.generation.weights.picks import Pick


@dataclass(frozen=True)
class Runs:
    """Elements of a flattened weight: `count` runs of `length` elements, whose starts are `period` elements apart."""

    start: int
    length: int
    count: int = 1
    period: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.length * self.count

    def view(self, flat: Tensor) -> Tensor:
        """Return these elements of a flat tensor as a view [count, length]."""
        return flat.as_strided((self.count, self.length), (self.period, 1), flat.storage_offset() + self.start)

    def moved(self, offset: int) -> Runs:
        """Return the same elements for a tensor that begins `offset` elements earlier."""
        return replace(self, start=self.start + offset)

    def within(self, start: int, stop: int) -> Iterator[Runs]:
        """Yield the elements inside an interval: whole runs, and a partial run at either end."""
        if self.count == 1:
            first, last = 0, 1
        else:
            first = max(0, (start - self.start - self.length) // self.period + 1)
            last = min(self.count, -((self.start - stop) // self.period))
        whole_from = first
        whole_to = last
        cut = []
        for run in sorted({first, last - 1} if first < last else ()):
            begin, end = self._start_of(run), self._start_of(run) + self.length
            if begin < start or end > stop:
                cut.append(Runs(max(begin, start), max(0, min(end, stop) - max(begin, start))))
                whole_from, whole_to = (run + 1, whole_to) if run == first else (whole_from, run)
        if whole_from < whole_to:
            cut.append(_even(self._start_of(whole_from), self.length, whole_to - whole_from, self.period))
        yield from sorted((runs for runs in cut if runs.elements), key=lambda runs: runs.start)

    def _start_of(self, run: int) -> int:
        return self.start + run * self.period


def needed_runs(picks: Sequence[Pick], shape: Sequence[int]) -> tuple[Runs, ...]:
    """Return the elements of a weight with this shape that at least one of the picks reads."""
    if len(picks) == 1:
        whole = torch.empty(shape, device="meta")
        part = picks[0](whole)
        runs = _of_view(part) if part is whole or part._base is whole else None
        if runs is not None:
            return (runs,) if runs.elements else ()
    return _of_mask(read_elements(picks, shape))


def read_elements(picks: Iterable[Pick], shape: Sequence[int]) -> Tensor:
    """Return a bool tensor of this shape, true for the elements that at least one of the picks reads."""
    weight = torch.zeros(()).expand(*shape).requires_grad_()  # an expanded scalar, without memory for each element
    with torch.enable_grad():
        total = torch.stack([pick(weight).sum() for pick in picks]).sum()
    if not total.requires_grad:
        return torch.zeros(*shape, dtype=torch.bool)
    (gradient,) = torch.autograd.grad(total, weight)
    return gradient != 0


def _of_view(view: Tensor) -> Runs | None:
    """Return the elements of a view of a contiguous tensor; None if they are not evenly spaced runs."""
    length = 1
    count = 1
    period = 0
    for stride, size in sorted((stride, size) for stride, size in zip(view.stride(), view.shape, strict=True)):
        if size == 1:
            continue
        if count == 1 and stride == length:
            length *= size
        elif count == 1 and stride > length:
            count = size
            period = stride
        elif stride == count * period:
            count *= size
        else:
            return None
    return _even(int(view.storage_offset()), length if view.numel() else 0, count, period)


def _of_mask(mask: Tensor) -> tuple[Runs, ...]:
    """Return the true elements. Adjacent rows that are equal become runs of the same columns."""
    rows = mask.reshape(len(mask), -1)
    width = rows.shape[1]
    changes = (rows[1:] != rows[:-1]).any(dim=1).nonzero().flatten() + 1
    runs = []
    for first, last in pairwise([0, *changes.tolist(), len(rows)]):
        edges = torch.nn.functional.pad(rows[first].int(), (1, 1)).diff().nonzero().flatten().tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            runs.append(_even(first * width + start, stop - start, last - first, width))
    return tuple(runs)


def _even(start: int, length: int, count: int, period: int) -> Runs:
    """Return runs, merged into a single run if they are adjacent."""
    if count == 1 or length == period:
        return Runs(start, length * count)
    return Runs(start, length, count, period)
