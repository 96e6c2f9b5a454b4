"""A temperature is found where the truth has one, and the calibration error is what it says it is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.functional.calibration import calibration_error, fit_temperature


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
    """In ten bins of 0.05: leads on both sides of their bounds, of which those in one bin cancel each other."""
    confidence = torch.tensor([0.5, 0.549, 0.551, 0.599, 0.94, 1.0]).double()
    right = torch.tensor([False, True, False, True, True, False])
    leads = torch.where(right, 1.0, -1.0) * torch.logit(confidence)
    gaps = [abs(0.451 - 0.5), abs(0.401 - 0.551), 0.06, 1.0]
    assert calibration_error(leads) == pytest.approx(sum(gaps) / 6)
    assert calibration_error(leads.float()) == calibration_error(leads.float().double())


def test_leads_without_a_best_temperature_end_at_the_bounds() -> None:
    assert fit_temperature(torch.tensor([1.0, 2.0])) == pytest.approx(1e-3, rel=1e-6)
    assert fit_temperature(torch.tensor([-1.0, -2.0])) == pytest.approx(1e3, rel=1e-6)


def test_three_of_four_right_are_a_probability_of_three_quarters() -> None:
    assert fit_temperature(torch.tensor([1.0, 1.0, 1.0, -1.0])) == pytest.approx(1 / math.log(3))
    leads = drawn(0.3, 50).float()
    assert fit_temperature(leads) == fit_temperature(leads.double())
