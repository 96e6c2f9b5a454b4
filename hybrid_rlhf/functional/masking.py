"""Sums, means and whitening over the entries that count.

Why here: every loss and statistic of RLHF runs over ragged rows. A value under a zero mask, NaN included, changes
neither result nor gradient: it is replaced before any arithmetic. Results are float32, or float64 if values are.

Source: Huang, Liu, von Werra, "The N Implementation Details of RLHF with PPO" (2023), no. 3 and 18. Deviation:
whitening takes the global batch, and the unbiased variance unless told.

Shapes: B batch, T time. Masks are bool or 0/1; 1 counts. A mask has the shape of its values; another is a ValueError,
since one that broadcasts would be counted wrongly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist


def at_least_float32(values: Tensor) -> Tensor:
    """Values in float32, or float64 where they are already."""
    return values if values.dtype is torch.float64 else values.float()


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Values where the mask counts, 0 elsewhere, in float32 or better; no gradient passes the zeros."""
    if mask.shape != values.shape:
        raise ValueError(f"a mask has the shape of its values: {tuple(mask.shape)} for {tuple(values.shape)}")
    return torch.where(mask.bool(), at_least_float32(values), 0.0)


def masked_sum(values: Tensor, *, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the values that count, over all entries or one dimension."""
    kept = keep(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, *, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values that count; 0 where none does."""
    total = masked_sum(values, mask=mask, dim=dim)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return total / count.clamp(min=1)


def masked_var(values: Tensor, *, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the values that count; unbiased divides by the count less one."""
    count = mask.bool().sum()
    kept = keep(values, mask)
    deviation = keep(kept - masked_mean(kept, mask=mask), mask)
    return deviation.square().sum() / (count - int(unbiased)).clamp(min=1)


def masked_whiten(
    values: Tensor,
    *,
    mask: Tensor,
    shift_mean: bool = True,
    unbiased: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Values with variance 1 and, with shift_mean, mean 0; 0 under the mask (N details, no. 18).

    The statistics carry no gradient. Equal values give finite results.

    Args:
        values: any shape.
        mask: same shape.
        shift_mean: false keeps the mean, as for rewards.
        unbiased: which variance; OpenAI's code of 2019 has the biased one, TRL and verl the unbiased.
        group: ranks whose values make one batch; each must call.

    Returns:
        the shape of values, in float32 or better.
    """
    kept = keep(values, mask)
    sums = torch.stack([kept.detach().sum(), mask.bool().sum().to(kept.dtype)])
    sums = _all_reduce(sums, group)
    count = sums[1].clamp(min=1)
    mean = sums[0] / count
    squares = _all_reduce(keep(kept.detach() - mean, mask).square().sum(), group)
    variance = squares / (sums[1] - int(unbiased)).clamp(min=1)
    whitened = (kept - mean) * torch.rsqrt(variance + 1e-8)
    return keep(whitened if shift_mean else whitened + mean, mask)


def last_index(mask: Tensor) -> Tensor:
    """Index [B] of each row's last entry that counts, of mask [B, T]; 0 for a row without one."""
    steps = torch.arange(mask.shape[1], device=mask.device)
    return (mask.bool() * steps).amax(dim=1)


def position_ids(mask: Tensor) -> Tensor:
    """Positions [B, T] that count real tokens from 0, wherever the padding is (N details, no. 3)."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
    return tensor
