"""Long work logs its progress: tokenising, the reference, evaluation, calibration, rollouts; a run logs its end."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from hybrid_rlhf.rl.rollouts import sampler
from hybrid_rlhf.runtime.observability import progress
from tests.support.steps import MODULES, step_line, write_rows

LINES = {
    "preference": [
        "tokenising ROWS: 1 of 60 rows, ",
        "rows of the run: 1 of ",
        "reference log-probs: 4 of ",
        "evaluation: 3 rows in ",
    ],
    "reward": ["tokenising ROWS: 1 of 60 rows, ", "evaluation: 3 rows in ", "calibration: 3 rows in "],
    "ppo": [
        "tokenising ROWS: 1 of 60 rows, ",
        "evaluation: 3 completions in ",
        "rollout of step 1: 4 completions in ",
    ],
}
MORE = {"reward": "--objective.calibrate true", "ppo": "--reference.refresh_every 0"}


@pytest.mark.parametrize("step", LINES)
def test_long_work_shows_that_it_moves(
    step: str, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_GROWTH", 0.0)
    monkeypatch.setattr(sampler, "STEP_SECONDS", 0.0)
    rows, output = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    line = step_line(step, output, model_folder, rows, MORE.get(step, "--seed 0"), "--train.max_steps 1")
    import_module(MODULES.get(step, f"training.{step}.main")).main(line)
    log = (output / "log.txt").read_text()
    for text in LINES[step]:
        assert f" {text.replace('ROWS', str(rows))}" in log, log
    assert re.search(rf" finished in .+: (model|actor) in {re.escape(str(output))}", log), log
