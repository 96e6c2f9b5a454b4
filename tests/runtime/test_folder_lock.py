"""A run folder is locked by one process until that process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_rlhf.runtime.files.folder_lock import LOCK_FILE, FolderLock, LockOwner
from tests.support.faults import run_step
from tests.support.ranks import run_apart
from tests.support.steps import MODULES, step_line, write_rows


def can_lock(folder: Path) -> bool:
    lock = FolderLock(folder)
    owner = lock.acquire()
    lock.release()
    return owner is None


def test_a_second_process_gets_the_owner_of_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert lock.acquire() is None
    assert FolderLock(tmp_path).acquire() == f"process {os.getpid()} on {socket.gethostname()}"
    assert can_lock(tmp_path.parent), "another folder has its own lock"
    lock.release()
    lock.release()
    assert can_lock(tmp_path)


def test_the_file_names_its_owner_while_the_lock_is_held(tmp_path: Path) -> None:
    """By process id, host and start time: the id alone may be another process's later."""
    lock = FolderLock(tmp_path)
    lock.acquire()
    owner = LockOwner.read((tmp_path / LOCK_FILE).read_text())
    assert owner is not None and (owner.pid, owner.host) == (os.getpid(), socket.gethostname())
    assert owner.is_alive() and owner.has_open(tmp_path)
    assert not replace(owner, start_ticks=owner.start_ticks - 1).is_alive()
    assert not replace(owner, host="elsewhere").is_alive()
    (tmp_path / LOCK_FILE).rename(tmp_path / "moved")
    (tmp_path / LOCK_FILE).touch()
    assert not owner.has_open(tmp_path), "another file of the same name"
    lock.release()
    assert (tmp_path / "moved").read_text() == ""
    for text in ("", "17 host\n", "x host 3", "1 2 3 4"):
        assert LockOwner.read(text) is None


def test_a_process_that_nobody_reaped_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        stat = Path(f"/proc/{child.pid}/stat").read_text()
        owner = LockOwner(child.pid, socket.gethostname(), int(stat.rpartition(")")[2].split()[19]))
        assert not owner.is_alive()


def test_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    run_apart(lock_with_children, tmp_path)


def lock_with_children(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.acquire()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"!")
        while True:
            signal.pause()
    os.read(reader, 1)
    waits = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    started = subprocess.Popen(waits, close_fds=False, stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()
    try:
        assert not can_lock(tmp_path)
        lock.release()
        assert can_lock(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        started.kill()
        started.communicate()


def test_a_file_system_without_locks_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    assert can_lock(tmp_path / "absent"), "the same where the lock file cannot be created"
    monkeypatch.setattr(fcntl, "flock", none)
    assert FolderLock(tmp_path).acquire() is None and FolderLock(tmp_path).acquire() is None


def test_the_same_command_twice_is_refused_on_every_rank(model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    command = step_line("sft", output, model_folder, write_rows(tmp_path / "rows.jsonl"))
    lock = FolderLock(output)
    lock.acquire()
    try:
        assert run_step(MODULES["sft"], 2, command, errors=tmp_path / "errors") == [2, 2]
    finally:
        lock.release()
    (line,) = [line for line in (tmp_path / "errors").read_text().splitlines() if "error" in line]
    assert line.startswith("error: output_dir")
    assert f"{output} is locked by process {os.getpid()} on {socket.gethostname()}: " in line
    assert line.endswith("set another output_dir")
