"""Curves as the coordinates of small SVG charts, which the template draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Size of the plotting area, in the units of the view box.
WIDTH = 300
HEIGHT = 96
_MAX_POINTS = 300
_LEAST_SPREAD = 1e-3
"""Of a curve that fills the height, relative to its largest value: a smaller one is as flat as its labels are equal."""
_MAIN = (
    "objective/scores",
    "eval/scores",
    "objective/kl",
    "teacher/kl",
    "policy/entropy",
    "policy/clipfrac",
    "completions/mean_length",
    "val/explained_variance",
    "sft/loss",
    "reward/loss",
    "preference/loss",
    "distill/loss",
    "eval/loss",
    "reward/accuracy",
    "preference/accuracy",
    "eval/accuracy",
    "eval/perplexity",
    "actor/grad_norm",
    "grad_norm",
    "lr",
)
"""Curves to show first; the others are collapsed by prefix."""
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Chart:
    """One curve."""

    name: str
    line: str
    """`x,y` of the points, y from the top."""
    last: float
    last_x: float
    last_y: float
    bottom: float
    top: float
    first_step: int
    last_step: int

    @classmethod
    def of(cls, name: str, points: Points) -> Chart:
        """Scale a curve, of at least one point, to the plotting area."""
        steps = [step for step, _ in points]
        values = [value for _, value in points]
        bottom = min(values)
        top = max(values)
        spread = max(top - bottom, _LEAST_SPREAD * max(abs(top), abs(bottom))) or 1.0
        width = (steps[-1] - steps[0]) or 1

        def place(step: int, value: float) -> tuple[float, float]:
            return WIDTH * (step - steps[0]) / width, HEIGHT * (0.5 - (value - (top + bottom) / 2) / spread)

        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in thinned(points, _MAX_POINTS)))
        return cls(name, line, values[-1], *place(steps[-1], values[-1]), bottom, top, steps[0], steps[-1])


def chart_groups(curves: Mapping[str, Points]) -> dict[str, list[Chart]]:
    """Charts under "main" and under the prefixes of the other metrics."""
    groups: dict[str, list[Chart]] = {"main": [Chart.of(name, curves[name]) for name in _MAIN if name in curves]}
    for name in sorted(curves.keys() - {*_MAIN}):
        prefix = name.partition("/")[0] if "/" in name else "other"
        groups.setdefault(prefix, []).append(Chart.of(name, curves[name]))
    return groups


def thinned(points: Points, limit: int) -> list[tuple[int, float]]:
    """At most `limit` points: the lowest and the highest of each stretch of steps, so that peaks stay."""
    if len(points) <= limit:
        return list(points)
    extremes: list[tuple[int, float]] = []
    size = -(-2 * len(points) // limit)
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        extremes += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return extremes
