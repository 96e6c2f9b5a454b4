"""Calibration error of a reward model's probabilities, and the temperature that calibrates them.

A lead is a margin that is positive for a correct judgement: the score of the chosen completion minus that of the
rejected one, the score of a good completion, or the negated score of a bad one. sigmoid(lead / temperature) is the
predicted probability of the label.

Source: Guo et al. 2017 (arXiv 1706.04599), sections 2 and 4.2. Shapes: E leads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TEMPERATURES = (1e-3, 1e3)
"""Range of the search: leads that are all positive, or mostly negative, have no finite optimum."""
_BINS = 10


def fit_temperature(leads: Tensor) -> float:
    """The maximum-likelihood temperature of leads [E], by bisection: concave in the inverse temperature."""
    leads = leads.double()
    low, high = (math.log(1 / limit) for limit in reversed(TEMPERATURES))
    for _ in range(60):
        middle = (low + high) / 2
        rising = float((leads * torch.sigmoid(-leads * math.exp(middle))).sum()) >= 0  # 0 if all leads are positive
        low, high = (middle, high) if rising else (low, middle)
    return math.exp(-(low + high) / 2)


def calibration_error(leads: Tensor, *, temperature: float = 1.0) -> float:
    """Expected calibration error: mean gap between confidence and accuracy, in ten bins of confidence [0.5, 1].

    Args:
        leads: [E], at least one; a lead of 0 counts as wrong.
        temperature: divisor of the leads.
    """
    leads = leads.double()
    confidence = torch.sigmoid(leads.abs() / temperature)
    place = ((confidence - 0.5) * 2 * _BINS).long().clamp(max=_BINS - 1)
    gaps = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, place, (leads > 0).double() - confidence)
    return float(gaps.abs().sum() / len(leads))
