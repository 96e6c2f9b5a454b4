"""Killed launchers: their ranks detect it, save and stop, and release the run folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from hybrid_rlhf.runtime.liveness import launcher, signals
from tests.support.faults import run_step
from tests.support.marks import faults, slow
from tests.support.runs import ENVIRONMENT, ROOT, pipeline_line, sft_line, start_until
from tests.support.steps import checkpoint_names

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2".split()
LONG = "--train.epochs 5000"
STARTS = {
    "torchrun": TORCHRUN,
    "train.py": ["train.py"],
    "train.py over torchrun": "train.py --launcher.num_processes 2".split(),
    "deepspeed": "DEEPSPEED --num_gpus 2 --no_local_rank".split(),
}


def command(start: str, output: Path, model: Path, rows: Path) -> list[str]:
    words = STARTS[start]
    if words[0] == "train.py":
        line = pipeline_line(output.parent, model, rows)[1:]
        more = f"--steps sft --sft.output_dir {output} --sft.train.max_steps 9000 --sft.train.epochs 9000"
        return [*words, *line, *more.split(), "--sft.logging.sinks", "[]"]
    if words[0] == "DEEPSPEED":
        found = shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        words = [str(found), *words[1:]]
    return [*words, *sft_line(output, model, rows, LONG, "--train.max_steps 9000")]


def still_alive(processes: Sequence[psutil.Process], *, seconds: float) -> list[psutil.Process]:
    """The processes that have not ended in time, which are killed. Zombies count as ended: their parent is dead."""
    deadline = time.monotonic() + seconds
    while (alive := [one for one in processes if launcher._is_alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for one in alive:
        one.kill()
    return alive


@pytest.mark.parametrize("start", [slow("torchrun"), *(faults(name) for name in STARTS if name != "torchrun")])
def test_ranks_save_and_stop_when_their_launcher_is_killed(
    start: str, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    output = tmp_path / "all" / "out"
    process = start_until(command(start, output, model_folder, pair_rows), "sft 2/")
    below = psutil.Process(process.pid).children(recursive=True)
    assert below
    process.kill()
    alive = still_alive(below, seconds=100)
    assert not alive, f"{alive} outlived their launcher"
    end = process.communicate()[0]
    if not start.startswith("train.py"):  # whose pipe ended with it
        assert "the launcher of this run has died: stopping as for SIGTERM" in end
    assert "stopped by a signal after writing checkpoints/step_" in (output / "log.txt").read_text()
    saved = max(int(name.removeprefix("step_")) for name in checkpoint_names(output))
    if start.startswith("train.py"):  # its settings differ
        return
    again = sft_line(output, model_folder, pair_rows, LONG, f"--resume auto --train.max_steps {saved + 1}")[1:]
    assert run_step("hybrid_rlhf.cli.sft", 2, again) == [0, 0]
    assert f"resumes from {output}/checkpoints/step_{saved}" in (output / "log.txt").read_text()


def test_a_process_started_from_a_shell_outlives_it(tmp_path: Path) -> None:
    """As `nohup python ... &` does when its shell ends; a process with the variables of a launcher does not."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\n"
        "from hybrid_rlhf.runtime.liveness.launcher import stop_with_launcher\n"
        "stop_with_launcher()\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    lives = {}
    for name, more, seconds in (("shell", {}, 4), ("torchrun", {"TORCHELASTIC_RUN_ID": "none"}, 40)):
        parent = subprocess.Popen(
            ["/bin/sh", "-c", f"{sys.executable} {script} & wait"],
            env={**ENVIRONMENT, **more},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        lives[name] = bool(still_alive([worker], seconds=seconds))
        parent.communicate()
    assert lives == {"shell": True, "torchrun": False}


def test_no_second_sigterm_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may end while its ranks save because of the same SIGTERM."""
    sent = Mock()
    monkeypatch.setattr(os, "kill", sent)
    monkeypatch.setattr(signals, "_stopping", threading.Event())
    signals.ask_to_stop()
    signals._stopping.set()
    signals.ask_to_stop()
    sent.assert_called_once_with(os.getpid(), signal.SIGTERM)


def test_the_launcher_of_deepspeed_is_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake(psutil.Process):
        def parent(self) -> psutil.Process | None:
            return Fake(self.ppid())

        def cmdline(self) -> list[str]:
            return "python /usr/bin/deepspeed --num_gpus 2".split()

    monkeypatch.setattr(launcher.psutil, "Process", Fake)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("CROSS_RANK", "0")
    parent = os.getppid()
    assert [process.pid for process in launcher._launchers(None)] == [parent, Fake(parent).ppid()]
    monkeypatch.setattr(Fake, "cmdline", lambda self: ["/bin/bash"])
    assert [process.pid for process in launcher._launchers(None)] == [parent], "a shell is no launcher"
