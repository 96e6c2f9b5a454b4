"""Rules for RL: pure functions of the curves. Each returns its evidence, or None if the curves are healthy.

The sources name the sign and the reason, and rarely a number. The thresholds are this project's; for those of KL,
length, components and held-out scores, docs/benchmarks/hacking.md measures hits and false alarms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from statistics import correlation, fmean
from typing import TypeAlias

from hybrid_rlhf.loop.advice.curves import Curves

_START = 5
"""Number of values to compare at the start of a curve."""
_RECENT = 5
"""Number of values to compare at the end of a curve."""
_FEW = 3
"""The same for a sign that a run of ten steps should show."""
_LEAST = 15
"""Smallest number of values of a curve that is compared."""
_STILL_ROLLOUTS = 10
"""Number of rollouts after which a policy should have moved."""
_STILL_NATS = 0.1
"""KL of a policy that has not moved: by Pinsker's inequality a tenth of a nat moves the mean of scores in [0, 1] by at
most 0.22."""
_TREND = 20
"""Number of rollouts for a trend: fewer are noisy, as prompts differ, more hide recent changes."""
_CLEAR_TREND = 0.6
"""Correlation of value and step in a clear trend, which one in 200 windows of independent values reaches by chance."""
_CRITIC_UPDATES = 50
"""Number of updates after which a critic should explain some variance."""
_CRITIC_WINDOW = 10
"""Number of rollouts in a row in which an idle critic explains nothing."""


Rule: TypeAlias = Callable[[Curves], str | None]


def _held(name: str, wrong: Callable[[float], bool], *, rollouts: int) -> Rule:
    """The rule that a metric is out of range for some rollouts in a row."""

    def check(curves: Curves) -> str | None:
        values = curves.last(name, rollouts)
        if len(values) < rollouts or not all(map(wrong, values)):
            return None
        return f"{name} is {values[-1]:.3g}, out of range for {rollouts} rollouts in a row"

    return check


def _fallen(name: str, *, share: float) -> Rule:
    """The rule that a metric is below a share of its initial value."""

    def check(curves: Curves) -> str | None:
        if curves.count(name) < _LEAST:
            return None
        start = fmean(curves.first(name, _START))
        now = fmean(curves.last(name, _RECENT))
        return f"{name} is {now:.3g}, it was {start:.3g} at the start" if now < share * start else None

    return check


def kl_explosion(curves: Curves) -> str | None:
    """The KL of ten rollouts is 10 nats or more, and three times that of the ten before, while the score rises."""
    kl = curves.last("objective/kl", _TREND)
    scores = curves.last("objective/scores", _TREND)
    if min(len(kl), len(scores)) < _TREND:
        return None
    half = _TREND // 2
    before = fmean(kl[:half])
    now = fmean(kl[half:])
    gain = _difference_of_halves(scores)
    if now < 10 or now < 3 * max(before, 0.0) or gain <= 0:
        return None
    return (
        f"the KL grew from {before:.3g} to {now:.3g} nats within {_TREND} rollouts while the score rose by {gain:.3g}"
    )


def diverging_components(curves: Curves) -> str | None:
    """One reward component rises while another falls, each clearly and by a quarter of its standard deviation."""
    rising = list[str]()
    falling = list[str]()
    for metric in curves.names:
        if not (metric.startswith("reward/") and metric.endswith("/mean")):
            continue
        points = curves.points(metric)[-_TREND:]
        name = metric.removeprefix("reward/").removesuffix("/mean")
        values = [value for _, value in points]
        if len(values) < _TREND // 2 or min(values) == max(values):
            continue
        trend = correlation([step for step, _ in points], values)
        change = _difference_of_halves(values)
        least = 0.25 * max(curves.last(f"reward/{name}/std", _TREND), default=0.0)
        if abs(trend) >= _CLEAR_TREND and abs(change) >= least:
            (rising if trend > 0 else falling).append(name)
    if not rising or not falling:
        return None
    return f"{', '.join(rising)} rises over the last {_TREND} rollouts while {', '.join(falling)} falls"


def constant_component(curves: Curves) -> str | None:
    """A reward component has one value for all completions of five rollouts."""
    found = []
    for metric in curves.names:
        if metric.startswith("reward/") and metric.endswith("/std"):
            name = metric.removesuffix("/std")
            means = curves.last(f"{name}/mean", _RECENT)
            if len(means) == _RECENT and not any(curves.last(metric, _RECENT)) and min(means) == max(means):
                found.append(f"{name.removeprefix('reward/')} is {means[0]:.3g}")
    return f"{', '.join(found)} for every completion of {_RECENT} rollouts" if found else None


def growing_truncation(curves: Curves) -> str | None:
    """At least half of the completions are truncated, twice as many as at first, while the score rises."""
    name = "completions/clipped_ratio"
    scores = curves.last("objective/scores", _LEAST)
    if curves.count(name) < 2 * _FEW or len(scores) < 2 * _FEW:
        return None
    start = fmean(curves.first(name, _FEW))
    now = fmean(curves.last(name, _FEW))
    gain = _difference_of_halves(scores)
    if now < max(0.5, 2 * start) or gain <= 0:
        return None
    return f"{name} is {now:.2g}, it was {start:.2g} at the start, while the score rose by {gain:.3g}"


def held_out_falls(curves: Curves) -> str | None:
    """The held-out score fell by a quarter of its standard deviation from its best, while the training score rose."""
    held_out = curves.points("eval/scores")
    std = curves.value("eval/scores_std")
    if len(held_out) < 3:
        return None
    best_step, best = max(held_out, key=lambda point: point[1])
    fall = best - held_out[-1][1]
    if not 0 < fall >= 0.25 * std or curves.rise("objective/scores", best_step) <= 0:
        return None
    return f"the held-out score fell by {fall:.3g} since step {best_step} while that of training rose"


entropy_collapse = _fallen("policy/entropy", share=0.1)
"""The entropy is below a tenth of its initial value."""


def length_drift(curves: Curves) -> str | None:
    """The completions of ten rollouts are 1.5 times as long as those of the first five, or the inverse."""
    name = "completions/mean_length"
    if curves.count(name) < _TREND:
        return None
    start = fmean(curves.first(name, _START))
    now = fmean(curves.last(name, _TREND // 2))
    if start <= 0 or 1 / 1.5 < now / start < 1.5:
        return None
    return f"completions have {now:.4g} tokens on average, {start:.4g} in the first {_START} rollouts"


truncation = _held("completions/clipped_ratio", lambda value: value > 0.9, rollouts=5)
"""More than nine of ten completions reach the length limit."""


clip_fraction = _held("policy/clipfrac", lambda value: value > 0.3, rollouts=5)
"""More than 30% of the tokens have a clipped ratio."""


explained_variance = _held("val/explained_variance", lambda value: value < 0, rollouts=10)
"""The critic explains less variance than a constant would."""


def idle_critic(curves: Curves) -> str | None:
    """After 50 updates the critic explains less than a twentieth of the variance of the returns."""
    name = "val/explained_variance"
    values = curves.last(name, _CRITIC_WINDOW)
    if len(values) < _CRITIC_WINDOW or max(map(abs, values)) > 0.05:
        return None
    updates = sum(value for _, value in curves.points("rollout/updates"))
    if updates < _CRITIC_UPDATES or explained_variance(curves):  # the more specific rule
        return None
    return f"{name} is {values[-1]:.3g} after {updates:.0f} updates, near 0 for {_CRITIC_WINDOW} rollouts in a row"


def still_policy(curves: Curves) -> str | None:
    """Since the learning rate reached its peak, for ten rollouts or more, KL and scores have not left their noise."""
    count = curves.since_peak("lr")
    shared = min(map(curves.count, ("objective/kl", "objective/scores")))
    if shared < count or count < _STILL_ROLLOUTS or curves.value("lr") <= 0:
        return None
    kl = fmean(curves.last("objective/kl", _RECENT))
    if abs(kl) >= _STILL_NATS:
        return None
    scores = curves.last("objective/scores", count)
    moved = _difference_of_halves(scores)
    if abs(moved) >= 3 * _noise_of_difference(scores):
        return None
    std = curves.value("objective/scores_std")
    return (
        f"objective/kl is {kl:.2g} nats per completion after {count} rollouts, and objective/scores "
        f"moved by {moved:.2g}, which is noise compared with their standard deviation of {std:.3g}"
    )


saturated_scores = _fallen("objective/scores_std", share=0.05)
"""The standard deviation of a rollout's scores is below a twentieth of its initial value."""


equal_groups = _held("rollout/frac_reward_zero_std", lambda value: value > 0.8, rollouts=5)
"""In more than 80% of the groups all scores are equal: their advantages are 0."""


def sampler_mismatch(curves: Curves) -> str | None:
    """Sampler and trainer disagree by more than 0.05 nats per token about tokens of the current weights."""
    if curves.value("rollout/stale_updates") > 0:
        return None
    return _held("rollout/logprob_abs_diff_mean", lambda value: value > 0.05, rollouts=5)(curves)


few_effective_samples = _held("rollout/effective_samples", lambda value: value < 0.3, rollouts=3)
"""The importance weights of the correction are so uneven that they count as less than 0.3 of the tokens."""


def _difference_of_halves(values: Sequence[float]) -> float:
    """The mean of the second half minus that of the first."""
    half = len(values) // 2
    return fmean(values[half:]) - fmean(values[:half])


def _noise_of_difference(values: Sequence[float]) -> float:
    """Standard error of the difference of halves, from differences of neighbours, so that a slow trend does not
    count."""
    variance = fmean((after - before) ** 2 for before, after in pairwise(values)) / 2
    return sqrt(4 * variance / len(values))
