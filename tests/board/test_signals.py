"""Each rule finds what it is for, and nothing in a run that learns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hybrid_rlhf.board.signals import MetricCurve, SampledStep, find_signals, repeated_part

STEPS = np.arange(1, 61)
NOISE = np.random.default_rng(0).normal(size=60)


def curves(**values: np.ndarray) -> dict[str, MetricCurve]:
    """A run that learns, with some metrics replaced."""
    normal = {
        "objective/scores": 0.01 * STEPS + 0.02 * NOISE,
        "objective/kl": 0.05 * STEPS,
        "eval/scores": np.where(STEPS % 10 == 0, 0.01 * STEPS, np.nan),
        "eval/scores_std": np.where(STEPS % 10 == 0, 1.0, np.nan),
        "completions/mean_length": 100 + NOISE,
        "reward/model/mean": 0.01 * STEPS + 0.02 * NOISE,
        "reward/format/mean": NOISE,
    }
    given = {name.replace("__", "/"): value for name, value in values.items()}
    return {name: MetricCurve.of(STEPS, np.asarray(value, float)) for name, value in (normal | given).items()}


def sampled(equal_groups: int = 0, last_text: str = "a reply of words that all differ here") -> list[SampledStep]:
    """A first and a last step of four groups of four."""
    groups = np.repeat(np.arange(4), 4)
    scores = np.where(groups < equal_groups, 1.0, np.arange(16.0))
    first = SampledStep(1, np.arange(16), groups, np.arange(16.0), ["one reply of words that all differ"] * 16)
    return [first, SampledStep(60, np.arange(16), groups, scores, [last_text] * 16)]


CASES: dict[str, Callable[[], tuple[dict[str, MetricCurve], list[SampledStep]]]] = {
    "diverging components": lambda: (curves(reward__format__mean=-0.1 * STEPS), sampled()),
    "collapsed groups": lambda: (curves(), sampled(equal_groups=3)),
    "length drift": lambda: (curves(completions__mean_length=100 + 2 * STEPS), sampled()),
    "repeated phrases": lambda: (curves(), sampled(last_text="so it is as it is so it is as it is so it is")),
    "KL explosion": lambda: (curves(objective__kl=np.where(STEPS > 50, 40.0, 3.0)), sampled()),
    "held-out score falls": lambda: (
        curves(eval__scores=np.where(STEPS % 10 == 0, 1.0 - 0.02 * STEPS, np.nan)),
        sampled(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_finds_its_fault_alone_with_evidence(name: str) -> None:
    (signal,) = find_signals(*CASES[name]())
    assert signal.name == name and signal.severity in ("warning", "alert")
    assert signal.step in (1, 60) and signal.evidence and "arXiv" in signal.source
    assert all({"label", "value"} == set(part) or {"step", "index"} == set(part) for part in signal.evidence)


def test_a_run_that_learns_has_none() -> None:
    assert find_signals(curves(), sampled()) == []
    assert find_signals({}, []) == []
    short = {name: curve.last(3) for name, curve in curves().items()}
    assert find_signals(short, sampled()[:1]) == []


def test_all_groups_equal_is_an_alert() -> None:
    (signal,) = find_signals(curves(), sampled(equal_groups=4))
    assert signal.severity == "alert" and signal.evidence[0] == {"label": "part of equal groups", "value": 1.0}


def test_the_repeated_part_counts_four_words() -> None:
    assert repeated_part("a b c") == 0.0
    assert repeated_part("a b c d a b c d") == pytest.approx(1 / 5)
    assert repeated_part("x " * 8) == pytest.approx(4 / 5)
