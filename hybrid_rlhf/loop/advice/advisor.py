"""Applies the rules: a rule fires at the first step with its evidence, and again after a step without the evidence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybrid_rlhf.loop.advice.curves import Curves
from hybrid_rlhf.loop.advice.rules import RULES, AdviceRule

_VALUE = re.compile(r"\{(\w+)(?:\*(\d+))?:([^}]*)\}")


@dataclass(frozen=True)
class Finding:
    """A rule that fired."""

    step: int
    rule: str
    evidence: str
    advice: str
    source: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.evidence}: {self.advice}"


class Advisor:
    """Takes the metrics of each step, and returns the rules that fire."""

    def __init__(self) -> None:
        self._curves = Curves()
        self._firing: set[str] = set()

    def watch(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Return the rules that start to fire at a step."""
        self._curves.add(step, metrics)
        fired = {rule.name: (rule, evidence) for rule in RULES if (evidence := rule.check(self._curves))}
        before = self._firing
        self._firing = {*fired}
        return [
            Finding(step, name, evidence, advice_text(rule, self._curves), rule.source)
            for name, (rule, evidence) in fired.items()
            if name not in before
        ]


def findings(lines: Iterable[Mapping[str, float]]) -> list[Finding]:
    """The rules that fire over a whole run, from its metrics.jsonl."""
    advisor = Advisor()
    return [finding for line in lines for finding in advisor.watch(int(line["step"]), line)]


def advice_text(rule: AdviceRule, curves: Curves) -> str:
    """The advice of a rule, with the last values of the metrics that it names."""

    def value(match: re.Match[str]) -> str:
        return format(curves.value(match[1].replace("__", "/")) * int(match[2] or 1), match[3])

    return _VALUE.sub(value, rule.advice)
