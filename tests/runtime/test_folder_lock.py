"""A run's folder is for one process, as long as that lives."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_rlhf.runtime.folder_lock import LOCK_FILE, FolderLock
from tests.faults.killing import run_step
from tests.faults.steps import MODULES, step_line, write_rows

HOLD = """
import sys, time
from pathlib import Path
from hybrid_rlhf.runtime.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print(lock.take(), flush=True)
time.sleep(600)
"""


def takes(folder: Path) -> bool:
    lock = FolderLock(folder)
    owner = lock.take()
    lock.release()
    return owner is None


def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert lock.take() is None
    assert FolderLock(tmp_path).take() == f"process {os.getpid()} on {socket.gethostname()}"
    assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()} {socket.gethostname()}\n"
    assert takes(tmp_path.parent), "another folder is another run's"
    lock.release()
    lock.release()
    assert takes(tmp_path)


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "None\n"
    assert not takes(tmp_path)
    process.kill()
    process.wait()
    process.stdout.close()
    assert takes(tmp_path)


def test_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.take()
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        os.write(told, b"!")
        while True:
            signal.pause()
    os.read(ready, 1)
    waits = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    started = subprocess.Popen(waits, close_fds=False, stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()
    try:
        assert not takes(tmp_path)
        lock.release()
        assert takes(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        started.kill()
        started.communicate()


def test_a_file_system_without_locks_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    assert takes(tmp_path / "absent"), "nor is one whose file cannot be made"
    monkeypatch.setattr(fcntl, "flock", none)
    assert FolderLock(tmp_path).take() is None and FolderLock(tmp_path).take() is None


def test_the_same_command_twice_is_refused_on_every_rank(model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    line = step_line("sft", output, model_folder, write_rows(tmp_path / "rows.jsonl"))
    lock = FolderLock(output)
    lock.take()
    try:
        assert run_step(MODULES["sft"], 2, line, errors=tmp_path / "said") == [2, 2]
    finally:
        lock.release()
    (said,) = [line for line in (tmp_path / "said").read_text().splitlines() if "error" in line]
    assert said == (
        f"error: a run's folder is for one process, {output} is used by process {os.getpid()} on "
        f"{socket.gethostname()}: end it, or give another output_dir"
    )
