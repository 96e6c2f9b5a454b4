"""Locks a run folder for one process: two that write the same metrics and checkpoints would corrupt both runs.

The operating system releases the lock when the process ends, for any reason. The lock file is never removed: otherwise
two processes could lock different files of the same name. It names its owner until the owner releases it: if that
process is gone, it was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path

LOCK_FILE = ".lock"
_LONGEST_OWNER = 300
_held: set[int] = set()
"""File descriptors of the locks that this process holds."""


@dataclass(frozen=True)
class LockOwner:
    """The process that a lock file names: the run's rank 0."""

    pid: int
    host: str
    start_ticks: int
    """Start time of the process, in clock ticks since the boot of its host: process ids are reused."""

    @classmethod
    def read(cls, text: str) -> LockOwner | None:
        """The owner in the text of a lock file; None if the file is empty or has another format."""
        match text.split():
            case [pid, host, ticks] if pid.isdecimal() and ticks.isdecimal() and len(text) <= _LONGEST_OWNER:
                return cls(int(pid), host, int(ticks))
        return None

    def is_alive(self) -> bool:
        """Return True if the process is alive on this host."""
        return self.host == socket.gethostname() and _start_ticks(self.pid) == self.start_ticks

    def has_open(self, folder: Path) -> bool:
        """Return True if the process has the lock file of a folder open.

        Raises:
            OSError: if its open files cannot be read, or there is no lock file.
        """
        lock = (folder / LOCK_FILE).lstat()
        descriptors = f"/proc/{self.pid}/fd"
        for name in os.listdir(descriptors):
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                opened = os.stat(f"{descriptors}/{name}")
                if (opened.st_dev, opened.st_ino) == (lock.st_dev, lock.st_ino):
                    return True
        return False


class FolderLock:
    """The lock of a folder; its file names the owner."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOCK_FILE
        self._descriptor = -1

    def acquire(self) -> str | None:
        """Acquire the lock, or return its owner. Continues without a lock if the file system does not support one."""
        with contextlib.suppress(OSError):
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            _held.add(self._descriptor)
            if _is_locked(self._descriptor):
                owner = LockOwner.read(os.read(self._descriptor, _LONGEST_OWNER).decode(errors="replace"))
                self._close()
                # The file is empty until its owner has written its id.
                return "another process" if owner is None else f"process {owner.pid} on {owner.host}"
            os.ftruncate(self._descriptor, 0)
            owner_text = f"{os.getpid()} {socket.gethostname()} {_start_ticks(os.getpid())}\n"
            os.write(self._descriptor, owner_text.encode())
        return None

    def release(self) -> None:
        """Release the lock, if it is held; its file then names no owner."""
        if self._descriptor in _held:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
        self._close()

    def _close(self) -> None:
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1


def _is_locked(descriptor: int) -> bool:
    """Return True if another process holds the lock; otherwise acquire it, if the file system supports locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it does not exist, or is a zombie."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *fields = content.rpartition(")")[2].split()  # a command's name may have spaces and parentheses
    return None if state in "ZX" else int(fields[18])


def _close_in_child() -> None:
    """Close the locks in a forked child, which shares them and may outlive the run."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
