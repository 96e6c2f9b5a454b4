"""Prompts by their running pass rates: which are taken, what an epoch is, and runs with a lag, on ranks and resumed."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_rlhf.configs.sections.rollout import CurriculumConfig
from hybrid_rlhf.rl.rollouts.curriculum import Curriculum
from tests.support.faults import Point, run_step
from tests.support.marks import slow
from tests.support.steps import MODULES, run_outputs, step_line

ROWS = 20
CONFIG = CurriculumConfig(min_pass_rate=0.2, max_pass_rate=0.8, revisit=0.3)


def stream_of(rates: dict[int, float], *, epochs: int = 3, seed: int = 1) -> Curriculum:
    """A stream whose rows have these pass rates."""
    stream = Curriculum(ROWS, epochs=epochs, seed=seed, config=CONFIG)
    for row, rate in rates.items():
        scores = (torch.arange(20) < round(rate * 20)).float()
        stream.observe(scores, groups=torch.zeros(20), rows=[row])
    return stream


def turns(seed: int, rows: int = ROWS) -> Any:
    """Each turn of the passes over the data: the row, and the chance that a skipped one is taken."""
    number = 0
    while True:
        order = np.random.default_rng([seed, number]).permutation(rows).tolist()
        yield from zip(order, np.random.default_rng([seed, number, 1]).random(rows).tolist(), strict=True)
        number += 1


def test_rows_outside_of_the_bounds_give_their_turn_to_the_next() -> None:
    """By a plain loop. Catches bounds that exclude themselves, unvisited rows that are skipped, and an end of an epoch
    that is not a number of prompts."""
    rates = {0: 0.0, 1: 0.15, 2: 0.2, 3: 0.5, 4: 0.8, 5: 0.85, 6: 1.0}
    stream = stream_of(rates)
    wanted = (row for row, chance in turns(1) if 0.2 <= rates.get(row, 0.5) <= 0.8 or chance < CONFIG.revisit)
    expected = [*itertools.islice(wanted, 3 * ROWS)]
    assert [row for count in (7, 1, 30, 50) for row in stream.take(count)] == expected, "any numbers at a time"
    assert stream.left == 0 and stream.take(1) == []


def test_a_stream_of_skipped_rows_does_not_end_early() -> None:
    stream = stream_of(dict.fromkeys(range(ROWS), 0.0))
    assert len(stream.take(3 * ROWS)) == 3 * ROWS
    metrics = stream.observe(torch.zeros(2), groups=torch.tensor([0, 0]), rows=[3])
    assert metrics["curriculum/skipped_prompts"] > 2 * ROWS and metrics["curriculum/wanted_prompts"] == 0


def test_a_pass_rate_is_an_exponential_average_over_visits() -> None:
    """By a plain loop, of groups of unequal sizes, some without a completion, and of a prompt that a step has twice."""
    chance = np.random.default_rng(3)
    stream = Curriculum(ROWS, epochs=9, seed=0, config=CurriculumConfig(pass_score=0.4, decay=0.7))
    expected: dict[int, float] = {}
    for _ in range(12):
        rows = chance.integers(0, 5, 4).tolist()
        groups = np.arange(4).repeat([1, *chance.integers(0, 6, 3)])
        scores = chance.random(len(groups)).astype(np.float32)
        for place, row in enumerate(rows):
            if len(mine := scores[groups == place] > 0.4):
                expected[row] = 0.7 * expected.get(row, mine.mean()) + 0.3 * mine.mean()
        metrics = stream.observe(torch.from_numpy(scores), groups=torch.from_numpy(groups), rows=rows)
        state = stream.state_dict()
        assert dict(zip(state["rows"], state["rates"], strict=True)) == pytest.approx(expected, abs=1e-12)
        rates = np.array(state["rates"])
        assert metrics["curriculum/pass_rate"] == pytest.approx(rates.mean())
        assert metrics["curriculum/wanted_prompts"] == pytest.approx(((0.1 <= rates) & (rates <= 0.9)).mean())


def first_letter(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """1 for a completion whose first character has an even number: about half of the samples of a random model."""
    return [float(bool(text) and ord(text[0]) % 2 == 0) for text in completions]


def line_of(output: Path, model: Path, *more: str) -> list[str]:
    """A run of six rollouts of eight prompts of 24, each with two completions."""
    rows = output.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(24)))
    words = "--algorithm grpo --rollout.sampling.n 2 --rollout.prompts_per_step 8 --train.epochs 9 --ptx null "
    words += "--data.eval_fraction 0 --train.eval_every 0 --rollout.curriculum.revisit 0.2"
    reward = f"[{{function: '{__file__}:first_letter'}}]"
    return step_line("ppo", output, model, rows, words, "--reward.components", reward, *more)


LAG = "--rollout.max_lag 1 --rollout.kv_cache_gib 0.1".split()


@pytest.mark.parametrize(("lag", "ranks"), [(0, 1), (1, 1), slow(0, 2)])
def test_a_step_takes_prompts_by_the_rates_that_are_known(
    lag: int, ranks: int, model_folder: Path, tmp_path: Path
) -> None:
    """By a plain loop over the recorded samples: the rates are those after the steps before the last `lag`."""
    run = tmp_path / "run"
    assert run_step(MODULES["ppo"], ranks, line_of(run, model_folder, *LAG * lag)) == [0] * ranks
    outputs = run_outputs(run)
    samples = [json.loads(line) for line in outputs["samples"]]
    rates: dict[int, float] = {}
    following = turns(42, 24)
    for step in range(1, 7):
        passed: dict[int, list[bool]] = {}
        for sample in samples:
            if sample["step"] == step - 1 - lag:
                passed.setdefault(sample["prompt_row"], []).append(sample["components"]["first_letter"] > 0.5)
        for row, of_row in passed.items():
            mean = sum(of_row) / len(of_row)
            rates[row] = 0.5 * rates.get(row, mean) + 0.5 * mean
        wanted = (row for row, chance in following if 0.1 <= rates.get(row, 0.5) <= 0.9 or chance < 0.2)
        taken = {sample["group"]: sample["prompt_row"] for sample in samples if sample["step"] == step}
        assert taken == dict(enumerate(itertools.islice(wanted, 8))), step
    assert sum(line.get("curriculum/skipped_prompts", 0.0) for line in outputs["metrics"]) > 0


@pytest.mark.parametrize(
    "more", [[], slow([*LAG, "--rollout.sampling.max_new_tokens", "8"])], ids=["synchronous", "lag"]
)
def test_a_killed_run_takes_the_same_prompts(
    more: list[str], model_folder: Path, stopping_model: Path, tmp_path: Path
) -> None:
    """Catches rates, a position or a count of skipped turns that are not of the checkpoint."""
    model = stopping_model if more else model_folder
    whole, cut = (line_of(tmp_path / name, model, *more) for name in ("whole", "cut"))
    assert run_step(MODULES["ppo"], 1, whole) == [0]
    point = Point("hybrid_rlhf.rl.updates.updater:Updater._update_actor", 18)
    assert run_step(MODULES["ppo"], 1, cut, point) == [-signal.SIGKILL]
    assert run_step(MODULES["ppo"], 1, [*cut, "--resume", "auto"]) == [0]
    assert run_outputs(tmp_path / "cut") == run_outputs(tmp_path / "whole")
