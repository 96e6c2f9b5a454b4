"""Resuming as a user does: a warm start from a finished model, and from the checkpoint of another run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import Point
from tests.support.steps import run_outputs
from tests.support.tiny import save_tiny, tiny_model

Run = Callable[..., list[int]]


@pytest.mark.faults
def test_a_finished_model_is_a_warm_start(tiny_run: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    ppo = "--reference.refresh_every 0 --train.max_steps 2"
    assert tiny_run("ppo", ppo, ranks=1, output=first) == [0]
    assert tiny_run("ppo", ppo, f"--resume {first}", ranks=1, output=second) == [0]
    log = (second / "log.txt").read_text()
    assert f"warm start from the weights in {first}; optimizer, schedule and data start from the beginning" in log
    before = [part for part in log.splitlines() if " ppo before training " in part][0]
    assert "eval/kl 0 " not in before, "the reference is what the first actor began as"


@pytest.mark.faults
def test_a_run_from_another_runs_checkpoint_is_killed_before_its_first_and_resumes(
    tiny_run: Run, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert tiny_run("sft", "--train.keep_last 9", ranks=1, output=first) == [0]
    start = first / "checkpoints" / "step_2"
    point = Point("hybrid_rlhf.engines.engine:ModelEngine.step", 2)
    assert tiny_run("sft", f"--resume {start}", ranks=1, output=second, armed=point) == [-signal.SIGKILL]
    assert not (second / "checkpoints").exists()
    assert tiny_run("sft", "--resume auto", ranks=1, output=second) == [0]
    assert f"resumes from {start}" in (second / "log.txt").read_text().partition("step_4")[0]
    want, found = run_outputs(first), run_outputs(second)
    assert found.pop("metrics") == [told for told in want.pop("metrics") if told["step"] > 2] and found == want


def test_a_checkpoint_resumes_with_its_own_algorithm(tiny_run: Run, tmp_path: Path) -> None:
    more = "--reference.refresh_every 0 --train.max_steps 2 --algorithm"
    assert tiny_run("ppo", f"{more} rloo", ranks=1) == [0]
    (tmp_path / "out" / "finished.json").unlink()
    errors = tmp_path / "errors"
    assert tiny_run("ppo", f"{more} reinforce --resume auto", ranks=1, errors=errors) == [2]
    assert "resumes with its algorithm rloo, got reinforce: set --algorithm rloo" in errors.read_text()


def test_a_reference_follows_an_actor_with_adapters(tiny_run: Run, tmp_path: Path) -> None:
    """KL of the first rollout after a refresh is none; the reference is a model of its own then."""
    more = "--actor.lora.rank 4 --reference.refresh_every 2 --train.max_steps 4 --actor.optimizer.lr 1e-2"
    assert tiny_run("ppo", more, ranks=1) == [0]
    kl = [told["objective/kl"] for told in run_outputs(tmp_path / "out")["metrics"] if "objective/kl" in told]
    assert abs(kl[0]) < 1e-5 < abs(kl[1]) and abs(kl[2]) < 1e-5 < abs(kl[3]), kl
    other = save_tiny(tmp_path / "other", tiny_model(0, num_hidden_layers=1))
    errors = tmp_path / "errors"
    assert tiny_run("ppo", f"--reference.path {other}", ranks=1, output=tmp_path / "no", errors=errors) == [2]
    assert "has another shape: leave reference.path out" in errors.read_text()
