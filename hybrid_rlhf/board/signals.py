"""Signs that a run learns something else than it should, from its metrics and samples; pure functions.

Each rule names its source and carries the numbers that it saw. The thresholds are conventions: they ask a person to
look, and decide nothing. `benchmarks/hacking.py` measures what they find and how often they are wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
WINDOW = 20
"""Steps that a trend is read from: fewer are noise of the prompts, more hide what happens now."""
BEGINNING = 5
"""Steps that tell how long completions were at first; a short run may change in ten."""
CLEAR_TREND = 0.6
"""Correlation of a value with the step within a window; of 20 independent values one in 200 reaches it by chance."""
CLEAR_CHANGE = 0.25
"""Change of a component within a window, in standard deviations of its scores; trends without one are drift."""
EQUAL_GROUPS = 0.5
"""Part of the groups with equal scores; these teach nothing, so half of the rollout is lost. One step alone is
noise: with eight groups, half of them are equal by chance now and then."""
LENGTH_FACTOR = 1.5
"""Growth of the mean length since the beginning, or its inverse."""
REPEATED_NOW, REPEATED_MORE = 0.2, 0.1
"""Part of repeated 4-grams, and its growth; text of people repeats about a twentieth."""
SAME_NOW, SAME_MORE = 0.5, 0.25
"""Part of the completions of a step that are one and the same, over all prompts, and its growth."""
COPIED_NOW, COPIED_MORE = 0.5, 0.25
"""Part of the word pairs of a completion that are in its prompt, and its growth."""
KL_FACTOR, KL_NATS = 3.0, 10.0
"""Growth of the KL from one window to the next, and its least value, in nats per completion."""
HELD_OUT_STDS = 0.25
"""Fall of the held-out score from its best, in standard deviations of the held-out scores."""
_GRAM, _PAIR = 4, 2
_FEWEST_PROMPTS = 4
_MOST_LOOKS = 200
"""Windows of a run that are looked at."""
_READ = ("reward/", "eval/scores", "objective/scores", "objective/kl", "completions/mean_length")
"""Prefixes of the metrics that rules read."""


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

    def until(self, step: int) -> MetricCurve:
        """The values up to a step."""
        end = int(np.searchsorted(self.steps, step, side="right"))
        return MetricCurve(self.steps[:end], self.values[:end])

    def last(self, count: int) -> MetricCurve:
        """The newest values."""
        return MetricCurve(self.steps[-count:], self.values[-count:])

    @property
    def trend(self) -> float:
        """Correlation of value and step; 0 for a constant."""
        if len(self.values) < WINDOW // 2 or np.ptp(self.values) == 0:
            return 0.0
        return float(np.corrcoef(self.steps, self.values)[0, 1])

    @property
    def change(self) -> float:
        """Mean of the second half less that of the first."""
        half = len(self.values) // 2
        return float(self.values[half:].mean() - self.values[:half].mean()) if half else 0.0


@dataclass(frozen=True)
class SampledStep:
    """The samples of one step."""

    step: int
    indices: NDArray[np.int64]
    groups: NDArray[np.int64]
    """-1: not recorded."""
    scores: Floats
    texts: Sequence[str] = ()
    """Completions of some rows."""
    prompts: Sequence[str] = ()
    """Their prompts."""
    places: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    """Those rows."""

    def evidence(self, texts: Iterable[int]) -> list[dict[str, Any]]:
        """The samples of the first of some texts."""
        rows = [self.places[text] for text in texts][:5]
        return [{"step": self.step, "index": int(self.indices[row])} for row in rows]


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
    first_step: int = 0
    """Where it was found first; `find_signals` sets it."""


def find_signals(curves: Mapping[str, MetricCurve], sampled: Sequence[SampledStep]) -> list[Signal]:
    """All findings over the whole run, alerts first: each as it was seen last, with the step where it was seen first.

    Args:
        curves: the metrics of a run by name.
        sampled: steps with samples, in order, the first and the last among them.
    """
    found: dict[str, Signal] = {}
    for signal in sorted([*_in_metrics(curves), *_in_samples(sampled)], key=lambda signal: signal.step):
        first = found[signal.name].first_step if signal.name in found else signal.step
        found[signal.name] = replace(signal, first_step=first)
    return sorted(found.values(), key=lambda signal: signal.severity != "alert")


def _in_metrics(curves: Mapping[str, MetricCurve]) -> Iterator[Signal]:
    """What the rules of metrics find at several steps, if they see nothing later."""
    read = {name: curve for name, curve in curves.items() if name.startswith(_READ) and len(curve.steps)}
    steps = np.unique(np.concatenate([np.empty(0, np.int64), *(curve.steps for curve in read.values())]))
    for place in np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_LOOKS)).astype(int)):
        known = {name: curve.until(steps[place]) for name, curve in read.items()}
        for rule in (diverging_components, length_drift, kl_explosion, held_out_falls):
            yield from rule(known)


def _in_samples(sampled: Sequence[SampledStep]) -> Iterator[Signal]:
    """What the rules of samples find at each step, beside those before it."""
    for count in range(1, len(sampled) + 1):
        for rule in (collapsed_groups, repeated_phrases, same_answer, copied_prompts):
            yield from rule(sampled[:count])


def diverging_components(curves: Mapping[str, MetricCurve]) -> Iterator[Signal]:
    """One reward component rises while another falls: the sum hides what is lost."""
    parts, clear = dict[str, MetricCurve](), dict[str, float]()
    for metric, whole in curves.items():
        if metric.startswith("reward/") and metric.endswith("/mean"):
            name = metric.removeprefix("reward/").removesuffix("/mean")
            parts[name], spread = whole.last(WINDOW), curves.get(f"reward/{name}/std")
            clear[name] = CLEAR_CHANGE * float(spread.last(WINDOW).values.max(initial=0.0)) if spread else 0.0
    rising = [name for name, part in parts.items() if part.trend >= CLEAR_TREND and part.change >= clear[name]]
    falling = [name for name, part in parts.items() if part.trend <= -CLEAR_TREND and -part.change >= clear[name]]
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
    """The completions of a prompt all have the same score, so that their advantages are 0, in two steps on end.

    Groups with the best score of all steps are solved, and not counted, where there are worse scores too.
    """
    if len(sampled) < 2:
        return
    seen = np.concatenate([each.scores[np.isfinite(each.scores)] for each in sampled])
    solved = float(seen.max()) if len(seen) and np.ptp(seen) > 0 else np.inf
    (equal_before, count_before), (equal, count) = (_equal_groups(step, solved) for step in sampled[-2:])
    if min(len(equal_before) / max(count_before, 1), len(equal) / max(count, 1)) >= EQUAL_GROUPS:
        step = sampled[-1]
        yield Signal(
            "collapsed groups",
            "alert" if len(equal) == count else "warning",
            step.step,
            f"{len(equal)} of {count} groups have equal scores, {len(equal_before)} of {count_before} in step "
            f"{sampled[-2].step}: they teach nothing",
            [
                {"label": "part of equal groups", "value": len(equal) / count},
                *({"step": step.step, "index": int(step.indices[rows[0]])} for rows in equal[:5]),
            ],
            "Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2",
        )


def length_drift(curves: Mapping[str, MetricCurve]) -> Iterator[Signal]:
    """Completions become much longer or shorter; scores often follow the length alone."""
    curve = curves.get("completions/mean_length")
    if curve is None or len(curve.values) < WINDOW:
        return
    before, now = float(curve.values[:BEGINNING].mean()), float(curve.values[-WINDOW // 2 :].mean())
    if before > 0 and (now / before >= LENGTH_FACTOR or now / before <= 1 / LENGTH_FACTOR):
        yield Signal(
            "length drift",
            "warning",
            int(curve.steps[-1]),
            f"completions have {now:.4g} tokens on average, {before:.4g} in the first {BEGINNING} steps",
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
        worst = np.argsort(shares)[::-1]
        yield Signal(
            "repeated phrases",
            "alert" if now >= 2 * REPEATED_NOW else "warning",
            last.step,
            f"{now:.0%} of the {_GRAM}-grams of a completion are repeated, {before:.0%} in step {first.step}",
            [
                {"label": "repeated part at first", "value": before},
                {"label": "repeated part now", "value": now},
                *last.evidence(worst),
            ],
            "Welleck et al. 2019, Neural text generation with unlikelihood training, arXiv 1908.04319 (seq-rep-4)",
        )


def same_answer(sampled: Sequence[SampledStep]) -> Iterator[Signal]:
    """Most completions of a step are one and the same, whatever the prompt."""
    before, now = (_commonest(step) for step in (sampled[0], sampled[-1]))
    if before is None or now is None or now.part < SAME_NOW or now.part - before.part < SAME_MORE:
        return
    last = sampled[-1]
    yield Signal(
        "same answer to all prompts",
        "alert",
        last.step,
        f"{now.part:.0%} of the completions are the same text, {before.part:.0%} in step {sampled[0].step}",
        [
            {"label": "part of the completions at first", "value": before.part},
            {"label": "part of the completions now", "value": now.part},
            *last.evidence(now.texts),
        ],
        "Kirk et al. 2023, Understanding the effects of RLHF on LLM generalisation and diversity, arXiv 2310.06452",
    )


def copied_prompts(sampled: Sequence[SampledStep]) -> Iterator[Signal]:
    """Completions repeat their prompts more than at the beginning."""
    with_texts = [step for step in sampled if step.texts and step.prompts]
    if len(with_texts) < 2:
        return
    first, last = with_texts[0], with_texts[-1]
    before, parts = (float(np.mean(_copied_parts(first))), _copied_parts(last))
    now = float(np.mean(parts))
    if now >= COPIED_NOW and now - before >= COPIED_MORE:
        worst = np.argsort(parts)[::-1]
        yield Signal(
            "prompt copied",
            "warning",
            last.step,
            f"{now:.0%} of the word pairs of a completion are in its prompt, {before:.0%} in step {first.step}",
            [
                {"label": "copied part at first", "value": before},
                {"label": "copied part now", "value": now},
                *last.evidence(worst),
            ],
            "Pan et al. 2022, The effects of reward misspecification, arXiv 2201.03544",
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
    grams = _grams(text, _GRAM)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def copied_part(text: str, prompt: str) -> float:
    """Part of a text's word pairs that its prompt has."""
    pairs, given = _grams(text, _PAIR), set(_grams(prompt, _PAIR))
    return sum(pair in given for pair in pairs) / len(pairs) if pairs else 0.0


@dataclass(frozen=True)
class _Commonest:
    """The answer that a step has most often."""

    part: float
    """Of its completions."""
    texts: list[int]
    """Which of its texts are this answer."""


def _commonest(step: SampledStep) -> _Commonest | None:
    """None where a step has too few different prompts to tell."""
    prompts = step.prompts or step.groups[step.places].tolist()
    if len({*prompts}) < _FEWEST_PROMPTS:
        return None
    ((answer, count),) = Counter(step.texts).most_common(1)
    return _Commonest(count / len(step.texts), [place for place, text in enumerate(step.texts) if text == answer])


def _equal_groups(step: SampledStep, solved: float) -> tuple[list[NDArray[np.intp]], int]:
    """Rows of the groups of several completions with one score below `solved`, and the number of groups of several."""
    members = [np.flatnonzero(step.groups == group) for group in np.unique(step.groups[step.groups >= 0])]
    members = [rows for rows in members if len(rows) > 1 and np.isfinite(step.scores[rows]).all()]
    equal = [rows for rows in members if np.ptp(step.scores[rows]) == 0 and step.scores[rows[0]] < solved]
    return equal, len(members)


def _copied_parts(step: SampledStep) -> list[float]:
    return [copied_part(text, prompt) for text, prompt in zip(step.texts, step.prompts, strict=True)]


def _grams(text: str, size: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[place : place + size]) for place in range(len(words) - size + 1)]


def _values(label: str, curve: MetricCurve) -> dict[str, Any]:
    return {"label": label, "value": f"{curve.values[0]:.4g}, {curve.values[-1]:.4g}"}
