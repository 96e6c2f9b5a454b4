"""Signs that a run learns something unintended: the rules of its advice, and rules that read samples.

Each rule names its source and reports its numbers. The thresholds are conventions that prompt a person to look.
`benchmarks/hacking.py` measures their hits and false alarms.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.loop.advice.advisor import advice_text
from hybrid_rlhf.loop.advice.curves import Curves
from hybrid_rlhf.loop.advice.rules import RULES

REPEATED_NOW = 0.2
"""Fraction of repeated 4-grams; in human text it is about a twentieth."""
REPEATED_MORE = 0.1
"""Growth of this fraction since the first step."""
SAME_NOW = 0.5
"""Fraction of a step's completions with the same text, over all prompts."""
SAME_MORE = 0.25
"""Growth of this fraction since the first step."""
COPIED_NOW = 0.5
"""Fraction of a completion's word pairs that are in its prompt."""
COPIED_MORE = 0.25
"""Growth of this fraction since the first step."""
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


def _in_samples(sampled: Sequence[SampledStep]) -> Iterator[Signal]:
    """Findings of the rules for samples at each step but the first, from it and the earlier ones."""
    for count in range(2, len(sampled) + 1):
        for rule in (repeated_phrases, same_answer, copied_prompts):
            yield from rule(sampled[:count])


def repeated_phrases(sampled: Sequence[SampledStep]) -> Iterator[Signal]:
    """Completions repeat themselves more than at the beginning."""
    first, last = sampled[0], sampled[-1]
    before = float(np.mean([*map(repeated_part, first.texts)]))
    parts = [*map(repeated_part, last.texts)]
    now = float(np.mean(parts))
    if now >= REPEATED_NOW and now - before >= REPEATED_MORE:
        yield Signal(
            "repeated phrases",
            "alert" if now >= 2 * REPEATED_NOW else "warning",
            last.step,
            f"{now:.0%} of the {_GRAM}-grams of a completion are repeated, {before:.0%} in step {first.step}",
            [
                {"label": "repeated part at first", "value": before},
                {"label": "repeated part now", "value": now},
                *last.evidence(np.argsort(parts)[::-1]),
            ],
            "Welleck et al. 2019, Neural text generation with unlikelihood training, arXiv 1908.04319 (seq-rep-4)",
        )


def same_answer(sampled: Sequence[SampledStep]) -> Iterator[Signal]:
    """Most completions of a step are the same, for different prompts."""
    first, last = sampled[0], sampled[-1]
    if min(len({*step.prompts}) for step in (first, last)) < _FEWEST_PROMPTS:
        return
    ((_, count_before),) = Counter(first.texts).most_common(1)
    ((answer, count),) = Counter(last.texts).most_common(1)
    before = count_before / len(first.texts)
    now = count / len(last.texts)
    if now < SAME_NOW or now - before < SAME_MORE:
        return
    yield Signal(
        "same answer to all prompts",
        "alert",
        last.step,
        f"{now:.0%} of the completions are the same text, {before:.0%} in step {first.step}",
        [
            {"label": "part of the completions at first", "value": before},
            {"label": "part of the completions now", "value": now},
            *last.evidence(place for place, text in enumerate(last.texts) if text == answer),
        ],
        "Kirk et al. 2023, Understanding the effects of RLHF on LLM generalisation and diversity, arXiv 2310.06452",
    )


def copied_prompts(sampled: Sequence[SampledStep]) -> Iterator[Signal]:
    """Completions repeat their prompts more than at the beginning."""
    first, last = sampled[0], sampled[-1]
    before = float(np.mean([*map(copied_part, first.texts, first.prompts)]))
    parts = [*map(copied_part, last.texts, last.prompts)]
    now = float(np.mean(parts))
    if now >= COPIED_NOW and now - before >= COPIED_MORE:
        yield Signal(
            "prompt copied",
            "warning",
            last.step,
            f"{now:.0%} of the word pairs of a completion are in its prompt, {before:.0%} in step {first.step}",
            [
                {"label": "copied part at first", "value": before},
                {"label": "copied part now", "value": now},
                *last.evidence(np.argsort(parts)[::-1]),
            ],
            "Pan et al. 2022, The effects of reward misspecification, arXiv 2201.03544",
        )


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
