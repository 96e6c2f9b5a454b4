"""Ranks under torchrun: a killed worker is restarted and resumes; the report of a stall names a reward that hangs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.run import effective_resume
from hybrid_rlhf.runtime.world import solo_world
from tests.support.runs import rl_line, run_python, sft_line

DIES_ONCE = """
import os, signal, sys, threading, time
from pathlib import Path
from hybrid_rlhf.cli.sft import main

def die(folder):
    while not list(folder.glob("checkpoints/step_*/manifest.json")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=die, args=(Path(sys.argv[1]),), daemon=True).start()
main(sys.argv[2:])
"""
HANGS = """
import os, time

def slow(prompts, completions, **columns):
    if os.environ["RANK"] == "1":
        time.sleep(600)
    return [0.0] * len(completions)
"""


def torchrun(line: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options, *line])


@pytest.mark.faults
def test_a_worker_that_dies_is_restarted_and_resumes(model_folder: Path, pair_rows: Path, tmp_path: Path) -> None:
    worker, folder = tmp_path / "worker.py", tmp_path / "out"
    worker.write_text(DIES_ONCE)
    options = "--train.save_every 3 --train.max_steps 40 --train.epochs 9"
    _, *line = sft_line(folder, model_folder, pair_rows, options)
    done = torchrun([str(worker), str(folder), *line], "--max-restarts=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unfinished run" not in done.stderr
    assert [line["step"] for line in read_metrics(folder)] == list(range(41))
    assert (folder / "finished.json").exists()
    # Either torchrun or the other rank detects the death first.
    assert "exitcode: -9" in done.stderr or "died in training of step" in done.stderr
    assert done.stdout.count("sft 1/40 ") == 1, "it did not start from the beginning"


@pytest.mark.faults
def test_a_reward_that_hangs_is_named_with_its_line(model_folder: Path, pair_rows: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(HANGS)
    config = tmp_path / "ppo.yaml"
    config.write_text(
        f"reward:\n  components:\n    - {{function: '{tmp_path}/rewards.py:slow', timeout_seconds: 900}}\n"
    )
    more = f"--config {config} --faults.phase_timeout_seconds 30"
    done = torchrun(rl_line(tmp_path / "out", model_folder, pair_rows, more))
    assert done.returncode != 0
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: rank 1 is stalled: in scoring of step 1 since ")
    assert "at rewards.py:6 slow (not in a collective); rank 0 waits for it in all_" in error, error
    assert f"stacks of all ranks: {tmp_path}/out/stacks/; " in error
    assert "slow" in (tmp_path / "out" / "stacks" / "rank_00001.txt").read_text()


def test_only_a_restarted_worker_resumes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    world = solo_world(torch.device("cpu"))
    for restarts, resume in ((None, "never"), ("0", "never"), ("1", "auto")):
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        if restarts is not None:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        assert effective_resume(SFTConfig(), world) == resume
    assert effective_resume(SFTConfig(resume="out/checkpoints/step_3"), world) == "auto", "not from step 3 again"
