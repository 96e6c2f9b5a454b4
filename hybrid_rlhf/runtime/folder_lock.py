"""One process at a time has a run's folder: two that write the same metrics and checkpoints would spoil both runs.

The system gives the lock back when the process ends, however it does. The file stays: to remove it would let two in.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

LOCK_FILE = ".lock"
_held: set[int] = set()
"""Descriptors of the locks that this process has."""


class FolderLock:
    """The lock of a folder; its file says who has it: process and host of the run's rank 0."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOCK_FILE
        self._descriptor = -1

    def take(self) -> str | None:
        """Take the lock, or say who has it. A file system without locks is gone on with."""
        with contextlib.suppress(OSError):
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            _held.add(self._descriptor)
            if _is_taken(self._descriptor):
                owner = os.read(self._descriptor, 300).decode(errors="replace").split()
                self.release()
                return f"process {' on '.join(owner)}" if owner else "another process"  # that has not said yet
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
        return None

    def release(self) -> None:
        """Give it back, if it was had."""
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1


def _is_taken(descriptor: int) -> bool:
    """Whether another has the lock; else this process has it, where there are locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _leave_to_parent() -> None:
    """A forked child shares the lock, and may outlive the run."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
