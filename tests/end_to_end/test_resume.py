"""Stopping and resuming as a user does: train.py under a signal, and a warm start from a finished model."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hybrid_rlhf.cli.rl import main
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from tests.support.faults import Point, run_step
from tests.support.runs import ENVIRONMENT, pipeline_line, run_python, start_until
from tests.support.steps import MODULES, run_outputs, step_line, write_rows
from tests.support.tiny import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.faults
def test_a_pipeline_that_receives_sigterm_saves_and_resumes(processes: int, model_folder: Path, tmp_path: Path) -> None:
    rows, output = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    line = pipeline_line(output, model_folder, rows)
    line += f"--steps sft --launcher.num_processes {processes} --sft.train.max_steps 12 --sft.train.epochs 20".split()
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
    process = start_until(line, "sft 1/", env=environment)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == STOPPED_EXIT_CODE, said[-3000:]
    assert "stopped by a signal after writing checkpoints/step_" in said and "run the same command to resume" in said
    assert "OMP_NUM_THREADS" not in said, "a banner of torchrun, which chooses one thread where none is chosen"
    again = run_python([*line, "--sft.logging.every", "2"])
    assert again.returncode == 0 and "resumes from" in again.stdout, again.stderr[-3000:]
    assert (output / "step1_sft" / "finished.json").exists()


@pytest.mark.faults
def test_a_finished_model_is_a_warm_start(model_folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    first, second = tmp_path / "first", tmp_path / "second"
    ppo = ["--reference.refresh_every", "0", "--train.max_steps", "2"]
    assert run_step(MODULES["ppo"], 1, step_line("ppo", first, model_folder, rows, *ppo)) == [0]
    line = step_line("ppo", second, model_folder, rows, *ppo, "--resume", str(first))
    assert run_step(MODULES["ppo"], 1, line) == [0]
    log = (second / "log.txt").read_text()
    assert f"warm start from the weights in {first}; optimizer, schedule and data start from the beginning" in log
    before = [part for part in log.splitlines() if " ppo before training " in part][0]
    assert "eval/kl 0 " not in before, "the reference is what the first actor began as"


@pytest.mark.faults
def test_a_run_from_another_runs_checkpoint_is_killed_before_its_first_and_resumes(
    model_folder: Path, tmp_path: Path
) -> None:
    rows, first, second = write_rows(tmp_path / "rows.jsonl"), tmp_path / "first", tmp_path / "second"
    assert run_step(MODULES["sft"], 1, step_line("sft", first, model_folder, rows, "--train.keep_last", "9")) == [0]
    line = step_line("sft", second, model_folder, rows)
    start = first / "checkpoints" / "step_2"
    point = Point("hybrid_rlhf.engines.engine:ModelEngine.step", 2)
    assert run_step(MODULES["sft"], 1, [*line, "--resume", str(start)], point) == [-signal.SIGKILL]
    assert not (second / "checkpoints").exists()
    assert run_step(MODULES["sft"], 1, [*line, "--resume", "auto"]) == [0]
    assert f"resumes from {start}" in (second / "log.txt").read_text().partition("step_4")[0]
    want, found = run_outputs(first), run_outputs(second)
    assert found.pop("metrics") == [told for told in want.pop("metrics") if told["step"] > 2] and found == want


def test_a_checkpoint_resumes_with_its_own_algorithm(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, more = write_rows(tmp_path / "rows.jsonl"), "--reference.refresh_every 0 --train.max_steps 2"
    line = step_line("ppo", tmp_path / "run", model_folder, rows, *more.split())
    assert run_step(MODULES["ppo"], 1, [*line, "--algorithm", "rloo"]) == [0]
    (tmp_path / "run" / "finished.json").unlink()
    with pytest.raises(SystemExit) as stopped:
        main([*line, "--algorithm", "reinforce", "--resume", "auto"])
    assert stopped.value.code == 2
    assert "resumes with its algorithm rloo, got reinforce: set --algorithm rloo" in capsys.readouterr().err


def test_a_reference_follows_an_actor_with_adapters(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KL of the first rollout after a refresh is none; the reference is a model of its own then."""
    more = ["--actor.lora.rank", "4", "--reference.refresh_every", "2", "--train.max_steps", "4"]
    rows = write_rows(tmp_path / "rows.jsonl")
    line = step_line("ppo", tmp_path / "run", model_folder, rows, *more, "--actor.optimizer.lr", "1e-2")
    assert run_step(MODULES["ppo"], 1, line) == [0]
    kl = [told["objective/kl"] for told in run_outputs(tmp_path / "run")["metrics"] if "objective/kl" in told]
    assert abs(kl[0]) < 1e-5 < abs(kl[1]) and abs(kl[2]) < 1e-5 < abs(kl[3]), kl
    other = tiny_model(0, num_hidden_layers=1)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit) as stopped:
        main(step_line("ppo", tmp_path / "no", model_folder, rows, "--reference.path", str(tmp_path / "other")))
    assert stopped.value.code == 2 and "has another shape: leave reference.path out" in capsys.readouterr().err
