"""Sums, means and whitening over the entries where a mask is 1.

Losses and statistics of RLHF are over ragged rows. A value under a zero mask, NaN included, changes neither result nor
gradient: it is replaced before any arithmetic. Results are float32, or float64 for float64 values.

Source: Huang, Liu, von Werra, "The N Implementation Details of RLHF with PPO" (2023), no. 3 and 18. Deviation:
whitening is over the global batch, by default with the unbiased variance.

Shapes: B batch, T time. Masks are bool or 0/1; 1 counts. A mask has the shape of its values; any other shape raises
ValueError, since a broadcast mask would be counted wrongly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Values in float32; float64 values are unchanged."""
    return values if values.dtype is torch.float64 else values.float()


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Values where the mask is 1, else 0, in float32 or better; gradients flow only where the mask is 1."""
    if mask.shape != values.shape:
        raise ValueError(f"a mask must have the shape of its values: {tuple(mask.shape)} for {tuple(values.shape)}")
    return torch.where(mask.bool(), at_least_float32(values), 0.0)


def row_sums(values: Tensor) -> Tensor:
    """Sums [B] of rows [B, T], accumulated in float64, so that rows with permuted values have equal sums."""
    return values.sum(dim=1, dtype=torch.float64).to(values.dtype)


def spread(values: Tensor) -> float:
    """Standard deviation of all values, dividing by their count; exactly 0 if all are equal."""
    return float((values - values.min()).std(correction=0))


def masked_sum(values: Tensor, *, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the values where the mask is 1, over all entries or one dimension."""
    masked = keep(values, mask)
    return masked.sum() if dim is None else masked.sum(dim)


def masked_mean(values: Tensor, *, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values where the mask is 1; 0 if the mask is 0 everywhere."""
    total = masked_sum(values, mask=mask, dim=dim)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return total / count.clamp(min=1)


def masked_var(values: Tensor, *, mask: Tensor, total: Callable[[Tensor], Tensor] = lambda partial: partial) -> Tensor:
    """Unbiased variance of the values where the mask is 1; `total` as in `masked_whiten`."""
    masked = keep(values, mask)
    count, summed = total(torch.stack([mask.bool().sum().to(masked.dtype), masked.sum()]))
    deviation = keep(masked - summed / count.clamp(min=1), mask)
    return total(deviation.square().sum()) / (count - 1).clamp(min=1)


def masked_whiten(
    values: Tensor,
    *,
    mask: Tensor,
    shift_mean: bool = True,
    unbiased: bool = True,
    total: Callable[[Tensor], Tensor] = lambda partial: partial,
) -> Tensor:
    """Values with variance 1 and, with shift_mean, mean 0; 0 where the mask is 0 (N details, no. 18).

    The statistics carry no gradient, and are accumulated in float64: equal float32 values have a deviation of 0.

    Args:
        values: tensor of any shape.
        mask: mask of the same shape.
        shift_mean: false keeps the mean, as for rewards.
        unbiased: use the unbiased variance, as TRL and verl do; OpenAI's code of 2019 uses the biased one.
        total: sums numbers over the ranks, where values are part of those to whiten.

    Returns:
        tensor with the shape of values, in float32 or better.
    """
    masked = keep(values, mask)
    count, summed = total(torch.stack([mask.bool().sum().double(), masked.detach().sum(dtype=torch.float64)]))
    mean = (summed / count.clamp(min=1)).to(masked.dtype)
    squares = total(keep(masked.detach() - mean, mask).square().sum(dtype=torch.float64))
    variance = (squares / (count - int(unbiased)).clamp(min=1)).to(masked.dtype)
    whitened = (masked - mean) * torch.rsqrt(variance + 1e-8)
    return keep(whitened if shift_mean else whitened + mean, mask)


def last_index(mask: Tensor) -> Tensor:
    """Index [B] of the last 1 in each row of a mask [B, T]; 0 for a row without one."""
    steps = torch.arange(mask.shape[1], device=mask.device)
    return (mask.bool() * steps).amax(dim=1)


def position_ids(mask: Tensor) -> Tensor:
    """Positions [B, T] that count real tokens from 0, for any position of the padding (N details, no. 3)."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)
