"""Each rule finds what it is for, and nothing in a run that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_rlhf.board import workspace
from hybrid_rlhf.board.signals import SampledStep, copied_part, find_signals, repeated_part
from hybrid_rlhf.loop.advice.rules import RULES
from tests.support.board import append_rows, sample_rows, workspace_of, write_run

STEPS = np.arange(1, 61)
NOISE = np.random.default_rng(0).normal(size=60)


def lines(**values: np.ndarray) -> list[dict[str, float]]:
    """The metrics of a run that learns, with some replaced."""
    normal = {
        "objective/scores": 0.01 * STEPS + 0.02 * NOISE,
        "objective/kl": 0.05 * STEPS,
        "eval/scores": np.where(STEPS % 10 == 0, 0.01 * STEPS, np.nan),
        "eval/scores_std": np.where(STEPS % 10 == 0, 1.0, np.nan),
        "completions/mean_length": 100 + NOISE,
        "reward/model/mean": 0.01 * STEPS + 0.02 * NOISE,
        "reward/format/mean": NOISE,
    }
    columns = normal | {name.replace("__", "/"): value for name, value in values.items()}
    return [
        {"step": int(step)} | {name: column[place] for name, column in columns.items() if np.isfinite(column[place])}
        for place, step in enumerate(STEPS)
    ]


def sampled(last_text: str = "reply {} of words that all differ") -> list[SampledStep]:
    """A first step and two last ones of four groups of four; {} in the text is the group."""
    groups = np.repeat(np.arange(4), 4)
    prompts = [f"say {group} in one new way" for group in groups]
    texts = [
        [text.replace("{}", str(group)) for group in groups]
        for text in ("answer {} has words that all differ", last_text)
    ]
    rows = np.arange(16)
    steps = ((1, 0), (50, 1), (60, 1))
    return [SampledStep(step, rows, texts[part], prompts, prompt_count=4) for step, part in steps]


CASES = {
    "diverging components": (lines(reward__format__mean=-0.1 * STEPS), sampled()),
    "repeated phrases": (lines(), sampled("{} it is as it is {} it is as it is {} it is")),
    "same answer to all prompts": (lines(), sampled("a reply of words that all differ")),
    "prompt copied": (lines(), sampled("say {} in one new way")),
    "KL explosion": (lines(objective__kl=np.where(STEPS > 50, 40.0, 3.0)), sampled()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_finds_its_fault_alone_with_evidence(name: str) -> None:
    (signal,) = find_signals(*CASES[name])
    assert signal.name == name and signal.severity in ("warning", "alert")
    assert signal.first_step <= signal.step == 60 and "arXiv" in signal.source
    assert signal.evidence or any(rule.name == name for rule in RULES)
    assert all({"label", "value"} == set(part) or {"step", "index"} == set(part) for part in signal.evidence)


def test_a_run_that_learns_has_none() -> None:
    assert find_signals(lines(), sampled()) == []
    assert find_signals([], []) == []
    assert find_signals(lines()[:3], sampled()[:1]) == []


def test_metrics_of_a_long_run_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is an object with all of its metrics: a million took gigabytes."""
    write_run(tmp_path / "one", steps=5, samples=2)
    board = workspace_of(tmp_path)
    (found,) = board.folders.all()
    read: list[Any] = []
    monkeypatch.setattr(workspace, "find_signals", lambda lines, _: read.append([line["step"] for line in lines]))
    board.signals(found)
    monkeypatch.setattr(workspace, "_SIGNAL_LINES", 2)
    board.signals(found)
    assert len(read[0]) > 2 and read[1] == [read[0][0], read[0][-1]]


def test_texts_are_read_from_all_of_a_step(tmp_path: Path) -> None:
    """A step of more groups than fit into the rows that are read, all of which but the first give one answer."""
    run = write_run(tmp_path / "one")
    append_rows(run, sample_rows(1, 160, group=32))
    rows = sample_rows(2, 160, group=32)
    append_rows(run, [{**row, "completion": "the same", "index": row["index"] + 1000} for row in rows])
    workspace = workspace_of(tmp_path)
    (found,) = workspace.folders.all()
    signals = {signal.name: signal for signal in workspace.signals(found)}
    shown = [part["index"] for part in signals["same answer to all prompts"].evidence if "index" in part]
    assert shown == [1000, 1002, 1005, 1007, 1010]


def test_what_has_passed_is_found_with_its_steps() -> None:
    falls = np.where(STEPS <= 30, -0.1 * STEPS, -3.0)
    (signal,) = find_signals(lines(reward__format__mean=falls), sampled())
    assert signal.name == "diverging components" and 10 <= signal.first_step < 30 <= signal.step < 60


def test_parts_count_two_copied_or_four_repeated_words() -> None:
    assert copied_part("a b c", "x a b") == 0.5
    assert copied_part("a", "a b") == repeated_part("a b c") == 0.0
    assert repeated_part("a b c d a b c d") == pytest.approx(1 / 5)
    assert repeated_part("x " * 8) == pytest.approx(4 / 5)
