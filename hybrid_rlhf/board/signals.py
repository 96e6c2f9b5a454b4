"""Signs that a run learns something unintended: the rules of its advice, and rules that read samples.

Each rule names its source and reports its numbers. The thresholds are conventions that prompt a person to look.
`benchmarks/hacking.py` measures their hits and false alarms.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.loop.advice.advisor import advice_text
from hybrid_rlhf.loop.advice.curves import Curves
from hybrid_rlhf.loop.advice.rules import RULES

_GRAM = 4
_PAIR = 2
_FEWEST_PROMPTS = 4
_MOST_LOOKS = 200
"""Number of steps at which a run is examined."""


@dataclass(frozen=True)
class SampledStep:
    """Some samples of one step."""

    step: int
    indices: NDArray[np.int64]
    """Index of each sample in its step."""
    texts: Sequence[str]
    """Its completion."""
    prompts: Sequence[str]
    """Its prompt."""
    prompt_count: int
    """Number of different prompts, also by their images."""

    def evidence(self, places: Iterable[int]) -> list[dict[str, Any]]:
        """References to the first five of some of the samples."""
        return [{"step": self.step, "index": int(self.indices[place])} for place in itertools.islice(places, 5)]


@dataclass(frozen=True)
class Signal:
    """One finding."""

    name: str
    severity: str
    """"warning" or "alert"."""
    step: int
    what: str
    evidence: list[dict[str, Any]]
    source: str
    first_step: int = 0
    """Step at which the sign was first found; set by `find_signals`."""


def find_signals(lines: Sequence[Mapping[str, float]], sampled: Sequence[SampledStep]) -> list[Signal]:
    """All findings over the whole run, alerts first: each in its last form, with the step of its first occurrence.

    Args:
        lines: lines of metrics.jsonl, for the rules of the run's advice.
        sampled: steps with samples, in order, the first and the last among them.
    """
    latest: dict[str, Signal] = {}
    for signal in sorted([*_in_metrics(lines), *_in_samples(sampled)], key=lambda signal: signal.step):
        first = latest[signal.name].first_step if signal.name in latest else signal.step
        latest[signal.name] = replace(signal, first_step=first)
    return sorted(latest.values(), key=lambda signal: signal.severity != "alert")


def _in_metrics(lines: Sequence[Mapping[str, float]]) -> Iterator[Signal]:
    """Findings of the advice rules at several steps, which see only earlier lines."""
    curves = Curves()
    looks = set(np.linspace(0, len(lines) - 1, min(len(lines), _MOST_LOOKS)).astype(int).tolist())
    for place, line in enumerate(lines):
        curves.add(int(line["step"]), line)
        for rule in RULES if place in looks else ():
            if (evidence := rule.check(curves)) is not None:
                severity = "alert" if rule.is_alert else "warning"
                what = f"{evidence}: {advice_text(rule, curves)}"
                yield Signal(rule.name, severity, curves.step, what, [], rule.source)


@dataclass(frozen=True)
class _SampleRule:
    """A part of each sample that grows: its mean over a step is compared with that of the first step."""

    name: str
    parts: Callable[[SampledStep], Sequence[float]]
    """The part of each sample of a step; empty for a step that does not show it."""
    least: float
    """Mean from which on the rule applies."""
    growth: float
    """Least growth of the mean since the first step."""
    what: str
    """Names the mean in a sentence."""
    label: str
    source: str
    alert_from: float = 0.0
    """Mean from which on it is an alert."""

    def check(self, first: SampledStep, last: SampledStep) -> Iterator[Signal]:
        """The finding, if the rule applies to two steps."""
        parts = [self.parts(first), self.parts(last)]
        before, now = (float(np.mean(of_step)) if len(of_step) else 0.0 for of_step in parts)
        if all(map(len, parts)) and now >= self.least and now - before >= self.growth:
            values = np.asarray(parts[1], float)
            places = np.argsort(-values, kind="stable")[: np.count_nonzero(values)]
            yield Signal(
                self.name,
                "alert" if now >= self.alert_from else "warning",
                last.step,
                f"{now:.0%} of {self.what}, {before:.0%} in step {first.step}",
                [
                    {"label": f"{self.label} at first", "value": before},
                    {"label": f"{self.label} now", "value": now},
                    *last.evidence(places),
                ],
                self.source,
            )


def _in_samples(sampled: Sequence[SampledStep]) -> Iterator[Signal]:
    """Findings of the rules for samples at each step but the first."""
    for last in sampled[1:]:
        for rule in _SAMPLE_RULES:
            yield from rule.check(sampled[0], last)


def _most_common(step: SampledStep) -> Sequence[float]:
    """1 for the samples that have the most common text; of a step with few prompts the text says nothing."""
    if step.prompt_count < _FEWEST_PROMPTS:
        return []
    ((answer, _),) = Counter(step.texts).most_common(1)
    return [float(text == answer) for text in step.texts]


def repeated_part(text: str) -> float:
    """Fraction of a text's word 4-grams that occurred earlier in it."""
    grams = _grams(text, _GRAM)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def copied_part(text: str, prompt: str) -> float:
    """Fraction of a text's word pairs that occur in its prompt."""
    pairs = _grams(text, _PAIR)
    prompt_pairs = set(_grams(prompt, _PAIR))
    return sum(pair in prompt_pairs for pair in pairs) / len(pairs) if pairs else 0.0


def _grams(text: str, size: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[place : place + size]) for place in range(len(words) - size + 1)]


_SAMPLE_RULES = (
    _SampleRule(
        "repeated phrases",
        lambda step: [*map(repeated_part, step.texts)],
        least=0.2,  # in human text it is about a twentieth
        growth=0.1,
        alert_from=0.4,
        what=f"the {_GRAM}-grams of a completion are repeated",
        label="repeated part",
        source="Welleck et al. 2019, Neural text generation with unlikelihood training, arXiv 1908.04319 (seq-rep-4)",
    ),
    _SampleRule(
        "same answer to all prompts",
        _most_common,
        least=0.5,
        growth=0.25,
        what="the completions are the same text",
        label="part of the completions",
        source="Kirk et al. 2023, Understanding the effects of RLHF on LLM generalisation and diversity, "
        "arXiv 2310.06452",
    ),
    _SampleRule(
        "prompt copied",
        lambda step: [*map(copied_part, step.texts, step.prompts)],
        least=0.5,
        growth=0.25,
        alert_from=math.inf,
        what="the word pairs of a completion are in its prompt",
        label="copied part",
        source="Pan et al. 2022, The effects of reward misspecification, arXiv 2201.03544",
    ),
)
