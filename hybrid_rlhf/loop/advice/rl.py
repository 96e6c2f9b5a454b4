"""Rules for RL: pure functions of the curves. Each returns its evidence, or None if the curves are healthy.

The thresholds are this project's: the sources name the sign and the reason, and rarely a number.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median

from hybrid_rlhf.loop.advice.curves import Curves

_START, _RECENT, _LEAST = 5, 5, 15
"""Values that are compared at the start and at the end of a curve, and how many it must have."""


def kl_explosion(curves: Curves) -> str | None:
    """The KL per token is above 0.1 nats, and five times what it was in the 50 rollouts before."""
    name, values = "objective/kl", curves.last("objective/kl", 53)
    recent, before = values[-3:], values[:-3]
    if len(before) < 10:
        return None
    usual, length = median(map(abs, before)), max(curves.value("completions/mean_length"), 1.0)
    if min(recent) < 5 * usual or min(recent) / length < 0.1:
        return None
    return f"{name} is {recent[-1]:.3g} nats per completion, it was {usual:.3g} in the median of {len(before)} rollouts"


def entropy_collapse(curves: Curves) -> str | None:
    """The entropy is below a tenth of that at the start."""
    return _fell(curves, "policy/entropy", share=0.1)


def length_drift(curves: Curves) -> str | None:
    """Completions are twice as long as at the start, or half."""
    name = "completions/mean_length"
    if curves.count(name) < _LEAST:
        return None
    start, now = fmean(curves.first(name, _START)), fmean(curves.last(name, _RECENT))
    if start <= 0 or 0.5 < now / start < 2:
        return None
    return f"{name} is {now:.3g} tokens, it was {start:.3g} at the start"


def truncation(curves: Curves) -> str | None:
    """More than nine of ten completions reach the length limit."""
    return held(curves, "completions/clipped_ratio", lambda value: value > 0.9, 5)


def clip_fraction(curves: Curves) -> str | None:
    """More than 30% of the tokens have a clipped ratio."""
    return held(curves, "policy/clipfrac", lambda value: value > 0.3, 5)


def explained_variance(curves: Curves) -> str | None:
    """The critic explains less than a constant would."""
    return held(curves, "val/explained_variance", lambda value: value < 0, 10)


def saturated_scores(curves: Curves) -> str | None:
    """The scores of a rollout hardly differ any more."""
    return _fell(curves, "objective/scores_std", share=0.05)


def equal_groups(curves: Curves) -> str | None:
    """In more than 80% of the groups all scores are equal: their advantages are 0."""
    return held(curves, "rollout/frac_reward_zero_std", lambda value: value > 0.8, 5)


def sampler_mismatch(curves: Curves) -> str | None:
    """Sampler and trainer disagree by more than 0.05 nats per token about tokens of the current weights."""
    if curves.value("rollout/stale_updates") > 0:
        return None
    return held(curves, "rollout/logprob_abs_diff_mean", lambda value: value > 0.05, 5)


def held(curves: Curves, name: str, wrong: Callable[[float], bool], rollouts: int) -> str | None:
    """Evidence that a metric was out of range for some rollouts in a row."""
    values = curves.last(name, rollouts)
    if len(values) < rollouts or not all(map(wrong, values)):
        return None
    return f"{name} is {values[-1]:.3g}, out of range for {rollouts} rollouts in a row"


def _fell(curves: Curves, name: str, *, share: float) -> str | None:
    """Evidence that a metric is below a share of what it was at the start."""
    if curves.count(name) < _LEAST:
        return None
    start, now = fmean(curves.first(name, _START)), fmean(curves.last(name, _RECENT))
    return f"{name} is {now:.3g}, it was {start:.3g} at the start" if now < share * start else None
