"""How well a score's probabilities hold, and the temperature under which they hold best.

A lead is by how much a judgement is right: the chosen answer's score over the rejected one's, or the score of a good
answer, less that of a bad one. sigmoid(lead / temperature) is the probability that was given to what is true.

Source: Guo et al. 2017 (arXiv 1706.04599), sections 2 and 4.2. Shapes: E leads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TEMPERATURES = (1e-3, 1e3)
"""Where the best one is looked for: of leads that are all right, or mostly wrong, there is none."""


def fit_temperature(leads: Tensor) -> float:
    """The temperature that makes leads [E] likeliest, by bisection: the likelihood is concave in its inverse."""
    leads = leads.double()
    low, high = (math.log(1 / limit) for limit in reversed(TEMPERATURES))
    for _ in range(60):
        middle = (low + high) / 2
        rising = float((leads * torch.sigmoid(-leads * math.exp(middle))).sum()) >= 0  # it vanishes where all are right
        low, high = (middle, high) if rising else (low, middle)
    return math.exp(-(low + high) / 2)


def calibration_error(leads: Tensor, *, temperature: float = 1.0, bins: int = 10) -> float:
    """Expected calibration error: the mean gap of confidence and accuracy, over equal bins of confidence [0.5, 1].

    Args:
        leads: [E], at least one; one of 0 is wrong.
        temperature: they are divided by it.
        bins: how many.
    """
    leads = leads.double()
    confidence = torch.sigmoid(leads.abs() / temperature)
    place = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, (leads > 0).double() - confidence)
    return float(gaps.abs().sum() / len(leads))
