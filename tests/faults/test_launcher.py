"""Launchers that are killed: their ranks notice, save and stop, and the folder is free for the next start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from hybrid_rlhf.runtime import launcher
from tests.end_to_end.test_train import ENVIRONMENT, ROOT, pipeline, sft
from tests.faults.killing import run_step
from tests.faults.steps import write_rows

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LONG = ["--train.epochs", "5000"]
STARTS = {
    "torchrun": TORCHRUN,
    "train.py": ["train.py"],
    "train.py over torchrun": ["train.py", "--launcher.num_processes", "2"],
    "deepspeed": ["DEEPSPEED", "--num_gpus", "2", "--no_local_rank"],
}


def command(start: str, output: Path, model: Path, rows: Path) -> list[str]:
    words = STARTS[start]
    if words[0] == "train.py":
        line = pipeline(output.parent, model, rows)[1:]
        return [*words, *line, "--sft.output_dir", str(output), "--steps", "sft", "--sft.train.max_steps", "9000",
                "--sft.train.epochs", "9000", "--sft.logging.tensorboard", "false"]  # fmt: skip
    if words[0] == "DEEPSPEED":
        found = shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        words = [str(found), *words[1:]]
    return [*words, *sft(output, model, rows, *LONG, "--train.max_steps", "9000")]


def still_alive(processes: Sequence[psutil.Process], *, seconds: float) -> list[psutil.Process]:
    """Those that have not ended after a time; they are killed. Who has ended may be a zombie: no parent waits."""
    deadline = time.monotonic() + seconds
    while (alive := [one for one in processes if launcher._lives(one)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for one in alive:
        one.kill()
    return alive


@pytest.mark.parametrize(
    "start",
    ["torchrun", "train.py"] + [pytest.param(name, marks=pytest.mark.faults) for name in [*STARTS][2:]],
)  # fmt: skip
def test_ranks_save_and_stop_when_their_launcher_is_killed(start: str, model_folder: Path, tmp_path: Path) -> None:
    rows, output = write_rows(tmp_path / "rows.jsonl"), tmp_path / "all" / "out"
    process = subprocess.Popen(
        [sys.executable, *command(start, output, model_folder, rows)],
        env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    while "sft 2/" not in process.stdout.readline():
        assert process.poll() is None
    below = psutil.Process(process.pid).children(recursive=True)
    assert below
    process.kill()
    killed_at = time.monotonic()
    alive = still_alive(below, seconds=30)
    assert not alive, f"{alive} outlived their launcher"
    assert time.monotonic() - killed_at < 20
    said = process.communicate()[0]
    if not start.startswith("train.py"):  # whose pipe ended with it
        assert "the launcher of this run has died: stopping as by SIGTERM" in said
    assert "stopped by SIGTERM, all is in checkpoints/step_" in (output / "log.txt").read_text()
    again = sft(output, model_folder, rows, *LONG, "--resume", "auto")[1:]
    saved = max(int(path.name.removeprefix("step_")) for path in (output / "checkpoints").iterdir())
    if start.startswith("train.py"):  # its cache and lengths are other ones
        return
    assert run_step("training.step1_sft.main", 2, [*again, "--train.max_steps", str(saved + 1)]) == [0, 0]
    assert f"goes on from {output}/checkpoints/step_{saved}" in (output / "log.txt").read_text()


def test_a_process_that_a_shell_started_outlives_it(tmp_path: Path) -> None:
    """As `nohup python ... &` does when its shell ends; with a launcher's variables it would not."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\n"
        "from hybrid_rlhf.runtime.launcher import stop_with_launcher\n"
        "stop_with_launcher()\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    lives = {}
    for name, more in {"shell": {}, "torchrun": {"TORCHELASTIC_RUN_ID": "none"}}.items():
        parent = subprocess.Popen(
            ["/bin/sh", "-c", f"{sys.executable} {script} & wait"], env={**ENVIRONMENT, **more}, cwd=ROOT,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        lives[name] = bool(still_alive([worker], seconds=4))
        parent.communicate()
    assert lives == {"shell": True, "torchrun": False}


def test_the_launcher_of_deepspeed_is_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake(psutil.Process):
        def parent(self) -> psutil.Process | None:
            return Fake(self.ppid())

        def cmdline(self) -> list[str]:
            return ["python", "/usr/bin/deepspeed", "--num_gpus", "2"]

    monkeypatch.setattr(launcher.psutil, "Process", Fake)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("CROSS_RANK", "0")
    parent = os.getppid()
    assert [process.pid for process in launcher._launchers(None)] == [parent, Fake(parent).ppid()]
    monkeypatch.setattr(Fake, "cmdline", lambda self: ["/bin/bash"])
    assert [process.pid for process in launcher._launchers(None)] == [parent], "a shell is no launcher"


def test_a_second_sigterm_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may end while its ranks save because of the same SIGTERM."""
    sent: list[Sequence[int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    monkeypatch.setattr(launcher.ask_to_stop.__globals__["_stopping"], "_flag", False)
    launcher.ask_to_stop()
    assert sent == [(os.getpid(), signal.SIGTERM)]
    monkeypatch.setattr(launcher.ask_to_stop.__globals__["_stopping"], "_flag", True)
    launcher.ask_to_stop()
    assert len(sent) == 1
