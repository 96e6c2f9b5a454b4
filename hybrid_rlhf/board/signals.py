"""Signs that a run learns something else than it should, from its metrics and samples; pure functions.

Each rule names its source and carries the numbers that it saw. The thresholds are conventions: they ask a person to
look, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
WINDOW = 20
"""Steps that a trend is read from: fewer are noise of the prompts, more hide what happens now."""
CLEAR_TREND = 0.6
"""Correlation of a value with the step within a window; of 20 independent values one in 200 reaches it by chance."""
EQUAL_GROUPS = 0.5
"""Part of the groups with equal scores; these teach nothing, so half of the rollout is lost."""
LENGTH_FACTOR = 1.5
"""Growth of the mean length since the beginning, or its inverse."""
REPEATED_NOW, REPEATED_MORE = 0.2, 0.1
"""Part of repeated 4-grams, and its growth; text of people repeats about a twentieth."""
KL_FACTOR, KL_NATS = 3.0, 10.0
"""Growth of the KL from one window to the next, and its least value, in nats per completion."""
HELD_OUT_STDS = 0.25
"""Fall of the held-out score from its best, in standard deviations of the held-out scores."""
_GRAM = 4


@dataclass(frozen=True)
class MetricCurve:
    """One metric over the steps, without missing values."""

    steps: NDArray[np.int64]
    values: Floats

    @classmethod
    def of(cls, steps: NDArray[np.int64], values: Floats) -> MetricCurve:
        """The finite values of a column."""
        kept = np.isfinite(values)
        return cls(steps[kept], values[kept])

    def last(self, count: int) -> MetricCurve:
        """The newest values."""
        return MetricCurve(self.steps[-count:], self.values[-count:])

    @property
    def trend(self) -> float:
        """Correlation of value and step; 0 for a constant."""
        if len(self.values) < WINDOW // 2 or np.ptp(self.values) == 0:
            return 0.0
        return float(np.corrcoef(self.steps, self.values)[0, 1])


@dataclass(frozen=True)
class SampledStep:
    """The samples of one step."""

    step: int
    indices: NDArray[np.int64]
    groups: NDArray[np.int64]
    """-1: not recorded."""
    scores: Floats
    texts: Sequence[str] = ()
    """Completions of the first rows."""


@dataclass(frozen=True)
class Signal:
    """One finding."""

    name: str
    severity: str
    """warning or alert."""
    step: int
    what: str
    evidence: list[dict[str, Any]]
    source: str


def find_signals(curves: Mapping[str, MetricCurve], sampled: Sequence[SampledStep]) -> list[Signal]:
    """All findings, alerts first.

    Args:
        curves: the metrics of a run by name.
        sampled: its first and its last steps with samples, in order.
    """
    found = [
        *diverging_components(curves),
        *collapsed_groups(sampled),
        *length_drift(curves),
        *repeated_phrases(sampled),
        *kl_explosion(curves),
        *held_out_falls(curves),
    ]
    return sorted(found, key=lambda signal: signal.severity != "alert")


def diverging_components(curves: Mapping[str, MetricCurve]) -> Iterator[Signal]:
    """One reward component rises while another falls: the sum hides what is lost."""
    parts = {
        name.removeprefix("reward/").removesuffix("/mean"): curve.last(WINDOW)
        for name, curve in curves.items()
        if name.startswith("reward/") and name.endswith("/mean")
    }
    rising = [name for name, curve in parts.items() if curve.trend >= CLEAR_TREND]
    falling = [name for name, curve in parts.items() if curve.trend <= -CLEAR_TREND]
    if rising and falling:
        yield Signal(
            "diverging components",
            "warning",
            int(parts[rising[0]].steps[-1]),
            f"{', '.join(rising)} rises over the last {WINDOW} steps while {', '.join(falling)} falls",
            [_values(f"{name}, first and last", parts[name]) for name in (*rising, *falling)],
            "Skalse et al. 2022, Defining and characterizing reward hacking, arXiv 2209.13085",
        )


def collapsed_groups(sampled: Sequence[SampledStep]) -> Iterator[Signal]:
    """The completions of a prompt all have the same score, so that their advantages are 0."""
    if not sampled:
        return
    step = sampled[-1]
    members = [np.flatnonzero(step.groups == group) for group in np.unique(step.groups[step.groups >= 0])]
    members = [rows for rows in members if len(rows) > 1 and np.isfinite(step.scores[rows]).all()]
    equal = [rows for rows in members if np.ptp(step.scores[rows]) == 0]
    if members and len(equal) / len(members) >= EQUAL_GROUPS:
        yield Signal(
            "collapsed groups",
            "alert" if len(equal) == len(members) else "warning",
            step.step,
            f"{len(equal)} of {len(members)} groups have equal scores: they teach nothing",
            [
                {"label": "part of equal groups", "value": len(equal) / len(members)},
                *({"step": step.step, "index": int(step.indices[rows[0]])} for rows in equal[:5]),
            ],
            "Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2",
        )


def length_drift(curves: Mapping[str, MetricCurve]) -> Iterator[Signal]:
    """Completions become much longer or shorter; scores often follow the length alone."""
    curve = curves.get("completions/mean_length")
    if curve is None or len(curve.values) < WINDOW:
        return
    before, now = float(curve.values[: WINDOW // 2].mean()), float(curve.values[-WINDOW // 2 :].mean())
    if before > 0 and (now / before >= LENGTH_FACTOR or now / before <= 1 / LENGTH_FACTOR):
        yield Signal(
            "length drift",
            "warning",
            int(curve.steps[-1]),
            f"completions have {now:.4g} tokens on average, {before:.4g} in the first {WINDOW // 2} steps",
            [{"label": "mean length at first", "value": before}, {"label": "mean length now", "value": now}],
            "Singhal et al. 2023, A long way to go: length correlations in RLHF, arXiv 2310.03716",
        )


def repeated_phrases(sampled: Sequence[SampledStep]) -> Iterator[Signal]:
    """Completions repeat themselves more than at the beginning."""
    with_texts = [step for step in sampled if step.texts]
    if len(with_texts) < 2:
        return
    first, last = with_texts[0], with_texts[-1]
    before, shares = float(np.mean([*map(repeated_part, first.texts)])), [*map(repeated_part, last.texts)]
    now = float(np.mean(shares))
    if now >= REPEATED_NOW and now - before >= REPEATED_MORE:
        worst = np.argsort(shares)[::-1][:5]
        yield Signal(
            "repeated phrases",
            "alert" if now >= 2 * REPEATED_NOW else "warning",
            last.step,
            f"{now:.0%} of the {_GRAM}-grams of a completion are repeated, {before:.0%} in step {first.step}",
            [
                {"label": "repeated part at first", "value": before},
                {"label": "repeated part now", "value": now},
                *({"step": last.step, "index": int(last.indices[place])} for place in worst),
            ],
            "Welleck et al. 2019, Neural text generation with unlikelihood training, arXiv 1908.04319 (seq-rep-4)",
        )


def kl_explosion(curves: Mapping[str, MetricCurve]) -> Iterator[Signal]:
    """The KL to the reference grows fast while the score rises: the score is bought by leaving the reference."""
    kl, scores = curves.get("objective/kl"), curves.get("objective/scores")
    half = WINDOW // 2
    if kl is None or scores is None or min(len(kl.values), len(scores.values)) < WINDOW:
        return
    before, now = float(kl.values[-WINDOW:-half].mean()), float(kl.values[-half:].mean())
    gain = float(scores.values[-half:].mean() - scores.values[-WINDOW:-half].mean())
    if now >= KL_NATS and now >= KL_FACTOR * max(before, 0.0) and gain > 0:
        yield Signal(
            "KL explosion",
            "alert",
            int(kl.steps[-1]),
            f"the KL grew from {before:.3g} to {now:.3g} nats within {WINDOW} steps while the score rose by {gain:.3g}",
            [
                {"label": "KL before", "value": before},
                {"label": "KL now", "value": now},
                {"label": "rise of the score", "value": gain},
            ],
            "Gao et al. 2022, Scaling laws for reward model overoptimization, arXiv 2210.10760",
        )


def held_out_falls(curves: Mapping[str, MetricCurve]) -> Iterator[Signal]:
    """The score of held-out prompts falls from its best while the score of training rises."""
    held_out, spread, training = (
        curves.get(f"{name}") for name in ("eval/scores", "eval/scores_std", "objective/scores")
    )
    if held_out is None or spread is None or training is None or len(held_out.values) < 3 or not len(spread.values):
        return
    best = int(np.argmax(held_out.values))
    fall = float(held_out.values[best] - held_out.values[-1])
    since = training.values[training.steps >= held_out.steps[best]]
    if len(since) < 2:
        return
    half = max(len(since) // 2, 1)
    gain = float(since[half:].mean() - since[:half].mean())
    if fall >= HELD_OUT_STDS * float(spread.values[-1]) and fall > 0 and gain > 0:
        yield Signal(
            "held-out score falls",
            "alert",
            int(held_out.steps[-1]),
            f"the held-out score fell by {fall:.3g} since step {held_out.steps[best]} while that of training rose",
            [
                {"label": f"held-out score in step {held_out.steps[best]}", "value": float(held_out.values[best])},
                {"label": "held-out score now", "value": float(held_out.values[-1])},
                {"label": "rise of the training score", "value": gain},
            ],
            "Gao et al. 2022, Scaling laws for reward model overoptimization, arXiv 2210.10760",
        )


def repeated_part(text: str) -> float:
    """Part of a text's word 4-grams that occurred before in it."""
    words = text.split()
    grams = [tuple(words[place : place + _GRAM]) for place in range(len(words) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _values(label: str, curve: MetricCurve) -> dict[str, Any]:
    return {"label": label, "value": f"{curve.values[0]:.4g}, {curve.values[-1]:.4g}"}
