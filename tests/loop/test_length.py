"""How long a run is: train.epochs and train.max_steps, in every step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_rlhf.configs.sections.training import TrainConfig
from tests.support.faults import run_step
from tests.support.steps import MODULES, run_outputs, step_line, write_lines

STEPS = MODULES | {"preference": "hybrid_rlhf.cli.preference"}


@pytest.fixture
def run(model_folder: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs a step on seven rows with an update for four of them, and gives its log."""

    def start(step: str, folder: str, *more: str) -> str:
        row = {"prompt": "say", "chosen": "one", "rejected": "two"}
        rows = write_lines(tmp_path / "rows.jsonl", [row | {"prompt": f"say {number}"} for number in range(7)])
        ahead = "--data.eval_fraction 0 --train.eval_every 0 --train.keep_last 9"
        if step == "ppo":
            ahead += " --algorithm.epochs 1 --reference.refresh_every 0 --ptx null --logging.samples_every 0"
        line = step_line(step, tmp_path / folder, model_folder, rows, ahead, *more)
        assert run_step(STEPS[step], 1, line) == [0]
        return (tmp_path / folder / "log.txt").read_text()

    return start


@pytest.mark.parametrize("step", STEPS)
def test_max_steps_alone_repeats_the_data(step: str, run: Callable[..., str], tmp_path: Path) -> None:
    """And a run that stopped in a later epoch resumes there, bit for bit."""
    log = run(step, "whole", "--train.max_steps 4 --train.save_every 3")
    assert "train.max_steps 4: the data repeats, an epoch has 1 step\n" in log
    whole = run_outputs(tmp_path / "whole")
    assert [line["step"] for line in whole["metrics"]][-4:] == [1, 2, 3, 4]
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    (tmp_path / "resumed" / "finished.json").unlink()
    assert "step_3" in run(step, "resumed", "--train.max_steps 4 --train.save_every 3 --resume auto")
    assert run_outputs(tmp_path / "resumed") == whole


def test_a_resumption_warns_of_other_settings_with_both_values(run: Callable[..., str], tmp_path: Path) -> None:
    run("sft", "run", "--train.max_steps 2 --train.save_every 2")
    (tmp_path / "run" / "finished.json").unlink()
    log = run("sft", "run", "--train.max_steps 3 --train.save_every 2 --optimizer.lr 0.5 --resume auto")
    assert "warning: settings differ from those of the checkpoint: optimizer.lr 0.5 instead of null" in log
    assert "train.max_steps 3 instead of 2" in log


@pytest.mark.parametrize(("step", "steps"), [("sft", 2), ("ppo", 3)])
def test_epochs_end_a_run_before_max_steps(step: str, steps: int, run: Callable[..., str], tmp_path: Path) -> None:
    """The prompts of RL go on in the next epoch, where a supervised step drops an incomplete batch."""
    log = run(step, "run", "--train.epochs 2 --train.max_steps 9 --train.save_every 0")
    assert f"train.epochs 2 ({steps} steps) ends the run, not train.max_steps 9\n" in log
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == steps


@pytest.mark.parametrize(
    ("given", "steps", "text"),
    [
        ({}, 5, ""),
        ({"max_steps": 5}, 5, ""),
        ({"max_steps": 3}, 3, ""),
        ({"max_steps": 3, "epochs": 1}, 3, "train.max_steps 3 ends the run, not train.epochs 1 (5 steps)"),
        ({"epochs": 1}, 5, ""),
    ],
)
def test_which_setting_ends_the_run_is_said_if_both_are_given(given: dict[str, int], steps: int, text: str) -> None:
    """Of five steps in an epoch."""
    config = TrainConfig(**given)
    assert (config.total_steps(5), config.length_text(5)) == (steps, text)
    assert (config.passes is None) == ("max_steps" in given and "epochs" not in given)
