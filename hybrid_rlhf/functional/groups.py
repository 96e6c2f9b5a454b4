"""Statistics over the completions of each prompt, whose number may differ between prompts.

If all values of a group are equal, their mean is exactly that value, so that deviations are exactly 0:
`differs_in_group` and the statistics agree on which groups are equal.

Shapes: N completions; groups [N] identifies each completion's prompt by any integer. Results are float32 or better;
they are not meant to be differentiated.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybrid_rlhf.functional.masking import at_least_float32


def group_sum(values: Tensor, *, groups: Tensor) -> Tensor:
    """Sum [N] of each completion's group."""
    values = at_least_float32(values)
    _, member = groups.unique(return_inverse=True)
    return torch.zeros_like(values).index_add(0, member, values)[member]


def group_size(groups: Tensor) -> Tensor:
    """Number of completions [N] float32 in each completion's group."""
    return group_sum(torch.ones(len(groups), device=groups.device), groups=groups)


def group_mean(values: Tensor, *, groups: Tensor) -> Tensor:
    """Mean [N] of each completion's group."""
    values = at_least_float32(values)
    low = _of_group(values, groups, "amin")  # a sum of equal values divided by their number would be rounded
    return low + group_sum(values - low, groups=groups) / group_size(groups)


def group_std(values: Tensor, *, groups: Tensor) -> Tensor:
    """Unbiased standard deviation [N] of each completion's group; 0 in a group of one."""
    centred = at_least_float32(values) - group_mean(values, groups=groups)
    squares = group_sum(centred.square(), groups=groups)
    return (squares / (group_size(groups) - 1).clamp(min=1)).sqrt()


def leave_one_out(values: Tensor, *, groups: Tensor) -> Tensor:
    """Each value [N] minus the mean of the other values of its group; 0 in a group of one."""
    size = group_size(groups)
    return (at_least_float32(values) - group_mean(values, groups=groups)) * size / (size - 1).clamp(min=1)


def differs_in_group(values: Tensor, *, groups: Tensor) -> Tensor:
    """True where the values of a completion's group are not all equal, [N] bool."""
    return _of_group(values, groups, "amax") > _of_group(values, groups, "amin")


def rank_in_group(values: Tensor, *, groups: Tensor) -> Tensor:
    """Rank [N] int64 of each value in its group, 0 for the highest; of equal values the earlier ranks higher."""
    by_value = torch.sort(values, descending=True, stable=True).indices
    order = by_value[torch.sort(groups[by_value], stable=True).indices]
    ordered = groups[order]
    positions = torch.arange(len(order), device=order.device)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    start = torch.where(begins, positions, 0).cummax(0).values
    return torch.empty_like(order).scatter(0, order, positions - start)


def _of_group(values: Tensor, groups: Tensor, extreme: Literal["amin", "amax"]) -> Tensor:
    """The smallest or largest value [N] in each completion's group."""
    order, member = groups.unique(return_inverse=True)
    empty = torch.zeros(len(order), dtype=values.dtype, device=values.device)
    return empty.scatter_reduce(0, member, values, extreme, include_self=False)[member]
