from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hybrid_rlhf.functional.masking import (
    last_index,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    position_ids,
    spread,
)
from tests.support.strategies import masked_batch

fast = settings(max_examples=40, deadline=None)


@fast
@given(masked_batch())
def test_sums_means_and_variances_are_those_of_the_picked_values(batch: tuple[list[Tensor], Tensor]) -> None:
    (values,), mask = batch
    picked = values[mask]
    torch.testing.assert_close(masked_sum(values, mask=mask), picked.sum())
    torch.testing.assert_close(masked_mean(values, mask=mask), picked.mean() if len(picked) else picked.sum())
    torch.testing.assert_close(
        masked_var(values, mask=mask), picked.var() if len(picked) > 1 else torch.tensor(0.0).double()
    )
    rows = torch.stack([row[keep].sum() for row, keep in zip(values, mask, strict=True)])
    torch.testing.assert_close(masked_sum(values, mask=mask, dim=1), rows)
    torch.testing.assert_close(masked_mean(values, mask=mask, dim=1), rows / mask.sum(dim=1).clamp(min=1))


@fast
@given(masked_batch())
def test_whitening_gives_mean_0_and_variance_1(batch: tuple[list[Tensor], Tensor]) -> None:
    (values,), mask = batch
    picked = values[mask]
    white = masked_whiten(values, mask=mask)
    assert torch.isfinite(white).all()
    assert (white[~mask] == 0).all()
    if len(picked) == 1:
        assert (white == 0).all()
    elif len(picked) > 1 and picked.var() > 1e-3:
        torch.testing.assert_close(white[mask], (picked - picked.mean()) / picked.std(), atol=1e-4, rtol=1e-4)
        kept = masked_whiten(values, mask=mask, shift_mean=False)[mask]
        torch.testing.assert_close(kept.mean(), picked.mean(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("unbiased", "expected"),
    [
        (False, [0.0508, 0.4381, 0.8254, 1.2127, 1.6, 1.9873, 2.3746, 2.7619, 3.1492]),
        (True, [0.1394, 0.5046, 0.8697, 1.2349, 1.6]),
    ],
)
def test_whitening_matches_the_published_values(unbiased: bool, expected: list[float]) -> None:
    """N implementation details, no. 18: 1.2 ... 2.0 with the mean kept, OpenAI's variance being the biased one."""
    values = torch.arange(1.2, 2.05, 0.1).view(3, 3)
    white = masked_whiten(values, mask=torch.ones(3, 3), shift_mean=False, unbiased=unbiased)
    torch.testing.assert_close(white.flatten()[: len(expected)], torch.tensor(expected), atol=1e-4, rtol=0)


def test_statistics_of_all_ranks_are_those_of_all_their_values() -> None:
    """Two ranks with the same values; variances near the 1e-8 that keeps the divisor from 0."""
    values, mask = torch.tensor([[1e-4, -1e-4, 3e-4]]), torch.tensor([[1, 1, 0]])
    for function in (masked_var, masked_whiten):
        found = function(values, mask=mask, total=lambda partial: 2 * partial)
        both = function(values.repeat(2, 1), mask=mask.repeat(2, 1))
        torch.testing.assert_close(found.flatten(), both.flatten()[: found.numel()])
    white = masked_whiten(values.requires_grad_(), mask=mask)
    scale = (2e-8 + 1e-8) ** -0.5
    torch.testing.assert_close(white, torch.tensor([[1, -1, 0]]) * 1e-4 * scale)
    (gradient,) = torch.autograd.grad(white[0, 0], values)
    torch.testing.assert_close(gradient, torch.tensor([[scale, 0.0, 0.0]]))


def test_equal_values_have_a_spread_of_exactly_0() -> None:
    assert spread(torch.full((7,), 0.1)) == 0 and spread(torch.tensor([1.0, 5.0])) == 2


def test_positions_and_last_index_follow_the_mask() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert last_index(mask).tolist() == [3, 1, 2, 0]
