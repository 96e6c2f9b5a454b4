"""Results of a measure: named values, with 95 % intervals where they estimate a mean over rows.

Proportions, and means of values in [0, 1], have Wilson's score interval over rows, which is conservative for values
between 0 and 1 (their variance is at most that of a proportion) and does not degenerate at 0 and 1. Other means have a
percentile bootstrap over rows.

Sources: Wilson 1927; Efron 1979; pass@k: Chen et al. 2021 (arXiv 2107.03374), section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

Z95 = 1.959964
"""Quantile of a normal distribution, two-sided 95 %."""
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value with a 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """Results of one measure."""

    title: str
    values: Mapping[str, Estimate | float | int]
    rows: Sequence[Mapping[str, object]] = ()
    """One entry per row, for the JSON file; empty if the measure has none."""

    def table(self) -> Table:
        """The values as a table for people."""
        table = Table("metric", "value", "95 % interval", title=self.title)
        for name, value in self.values.items():
            if isinstance(value, Estimate):
                table.add_row(name, f"{value.value:.4g}", f"{value.low:.4g} to {value.high:.4g}")
            else:
                table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}", "")
        return table


def wilson(values: Sequence[float]) -> Estimate:
    """The mean of values in [0, 1], one per row."""
    count = len(values)
    mean = float(np.mean(values))
    center = (mean + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    half = Z95 / (1 + Z95**2 / count) * math.sqrt(mean * (1 - mean) / count + Z95**2 / (4 * count**2))
    # ends that are 0 or 1 must be exact, without rounding errors
    low = 0.0 if mean == 0 else max(0.0, center - half)
    return Estimate(mean, low, 1.0 if mean == 1 else min(1.0, center + half))


def bootstrap(
    totals: Sequence[float] | np.ndarray,
    counts: Sequence[float] | np.ndarray,
    *,
    seed: int,
    transform: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> Estimate:
    """A ratio of two sums over rows, such as the loss per token; a mean where all counts are 1.

    Args:
        totals: numerator of each row.
        counts: denominator of each row.
        seed: seed of the resampling.
        transform: function applied to the ratio.
    """
    pairs = np.stack([np.asarray(totals, dtype=np.float64), np.asarray(counts, dtype=np.float64)])
    generator = np.random.default_rng(seed)
    rows = pairs.shape[1]
    sums = np.stack([pairs[:, generator.integers(rows, size=rows)].sum(axis=1) for _ in range(_RESAMPLES)])
    low, high = np.percentile(transform(sums[:, 0] / sums[:, 1]), [2.5, 97.5])
    return Estimate(float(transform(np.asarray(pairs[0].sum() / pairs[1].sum()))), float(low), float(high))


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k completions passes, from `samples` of the prompt."""
    if samples - passed < k:
        return 1.0
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)
