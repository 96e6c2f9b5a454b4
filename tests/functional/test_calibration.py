"""A temperature is found where the truth has one, and the calibration error is what it says it is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.functional.calibration import TEMPERATURES, calibration_error, fit_temperature


def drawn(scale: float, count: int = 20_000) -> Tensor:
    """Leads of a model whose every difference is `scale` times what it should be."""
    chance = torch.Generator().manual_seed(0)
    true = torch.randn(count, generator=chance).double().abs() * 1.5
    right = torch.rand(count, generator=chance).double() < torch.sigmoid(true)
    return scale * torch.where(right, true, -true)


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
def test_the_temperature_is_the_scale_and_calibrates(scale: float) -> None:
    leads = drawn(scale)
    found = fit_temperature(leads)
    assert found == pytest.approx(scale, rel=0.05)
    for other in (0.97 * found, 1.03 * found):
        assert logsigmoid(leads / found).sum() > logsigmoid(leads / other).sum()
    assert calibration_error(leads, temperature=found) < 0.015
    if scale != 1.0:
        assert calibration_error(leads) > 0.08


def test_the_error_is_the_mean_gap_of_confidence_and_accuracy() -> None:
    sure = math.log(0.93 / 0.07)  # nine tenths of the way in bins of 0.05
    leads = torch.tensor([sure, sure, sure, -sure, 0.0])
    # four at 0.93 of which 0.75 are right, and one at 0.5 that is wrong
    assert calibration_error(leads) == pytest.approx((4 * 0.18 + 0.5) / 5)
    assert calibration_error(torch.tensor([1e9])) == pytest.approx(0.0)


def test_leads_without_a_best_temperature_end_at_the_bounds() -> None:
    assert fit_temperature(torch.tensor([1.0, 2.0])) == pytest.approx(TEMPERATURES[0], rel=1e-6)
    assert fit_temperature(torch.tensor([-1.0, -2.0])) == pytest.approx(TEMPERATURES[1], rel=1e-6)
