"""Locks a run folder for one process: two that write the same metrics and checkpoints would corrupt both runs.

The operating system releases the lock when the process ends, for any reason. The lock file is never removed: otherwise
two processes could lock different files of the same name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

LOCK_FILE = ".lock"
_held: set[int] = set()
"""File descriptors of the locks that this process holds."""


class FolderLock:
    """The lock of a folder; its file names the owner: process id and host of the run's rank 0."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOCK_FILE
        self._descriptor = -1

    def acquire(self) -> str | None:
        """Acquire the lock, or return its owner. Continues without a lock if the file system does not support one."""
        with contextlib.suppress(OSError):
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            _held.add(self._descriptor)
            if _is_locked(self._descriptor):
                owner = os.read(self._descriptor, 300).decode(errors="replace").split()
                self.release()
                # The file is empty until its owner has written its id.
                return f"process {' on '.join(owner)}" if owner else "another process"
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
        return None

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1


def _is_locked(descriptor: int) -> bool:
    """Whether another process holds the lock; otherwise this one acquires it, if the file system supports locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _close_in_child() -> None:
    """A forked child shares the lock and may outlive the run."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
