"""Rules for every training loop: pure functions of the curves. Each returns its evidence, or None if the curves are
healthy. Thresholds are this project's, as in `rl.py`.
"""

from __future__ import annotations

from statistics import fmean, median

from hybrid_rlhf.loop.advice.curves import Curves

_SPIKE_WINDOW = 50
_SPIKES = 3
_CHANCE = 0.55
"""Accuracy of pairs below which it is close to the 0.5 of guessing."""


def loss_not_finite(curves: Curves) -> str | None:
    """A loss of the step is NaN or infinite."""
    names = [name for name in curves.not_finite if "loss" in name or "grad_norm" in name]
    return f"{' and '.join(names)} not finite" if names else None


def skipped_steps(curves: Curves) -> str | None:
    """Two or more of the last 20 steps were skipped."""
    totals = curves.last("faults/skipped_steps", 20)  # a running total; absent before the first
    if not totals:
        return None
    before = 0.0 if len(totals) < 20 else totals[0]
    skipped = totals[-1] - before
    return f"{skipped:.0f} of the last {len(totals)} steps were skipped" if skipped >= 2 else None


def gradient_spikes(curves: Curves) -> str | None:
    """Three or more of the last 50 gradient norms are above ten times their median."""
    for name in (name for name in curves.names if name.endswith("grad_norm")):
        values = curves.last(name, _SPIKE_WINDOW)
        usual = median(values)
        spikes = [value for value in values if value > 10 * usual > 0]
        if len(values) >= 10 and len(spikes) >= _SPIKES:
            return (
                f"{len(spikes)} of the last {len(values)} values of {name} are above ten times {usual:.3g}, the median"
            )
    return None


def overfitting(curves: Curves) -> str | None:
    """The last two evaluations are worse than the best by 2%, while the training loss fell further."""
    held_out = curves.points("eval/loss")
    if len(held_out) < 3:
        return None
    best_step, best = min(held_out[:-2], key=lambda point: point[1])
    if min(value for _, value in held_out[-2:]) <= best + 0.02 * abs(best):
        return None
    for name in (name for name in curves.names if name.endswith("/loss") and not name.startswith("eval")):
        if curves.rise(name, best_step + 1) < 0:
            last = held_out[-1][1]
            return f"eval/loss is {last:.3g}, it was {best:.3g} at step {best_step}, and {name} falls further"
    return None


def accuracy_at_chance(curves: Curves) -> str | None:
    """The last three evaluations after training has begun, or without any the last 30 steps, are close to 0.5."""
    held_out = [value for step, value in curves.points("eval/accuracy") if step > 0]
    if held_out:
        recent = held_out[-3:]
        at_chance = len(recent) == 3 and max(recent) < _CHANCE
        return f"eval/accuracy is {recent[-1]:.3g} after {len(held_out)} evaluations" if at_chance else None
    for name in (name for name in curves.names if name.endswith("/accuracy") and not name.startswith("eval")):
        values = curves.last(name, 30)
        if len(values) == 30 and fmean(values) < _CHANCE:
            return f"{name} is {fmean(values):.3g} in the mean of the last 30 steps"
    return None
