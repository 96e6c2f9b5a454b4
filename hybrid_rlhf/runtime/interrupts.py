"""What the system or a person asks of a run by signal: SIGTERM, save and stop; SIGUSR1, save and go on.

Schedulers send them before they take a machine away. A second SIGTERM stops at once. Outside its loop a run has nothing
to save: SIGUSR1 is dropped there, and SIGTERM ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess  # for a type alone  # nosec B404
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType

import psutil

STOPPED_EXIT_CODE = 128 + signal.SIGTERM
"""What a shell calls the exit code of a process that SIGTERM ended."""
_stopping = threading.Event()
"""Set once SIGTERM has asked the loop of this process to save and stop."""


class Interrupts:
    """Remembers what was asked for."""

    def __init__(self) -> None:
        self.stop = False
        self.saves = 0
        """How often a checkpoint was."""

    def caught(self) -> AbstractContextManager[None]:
        """Catch the signals inside."""
        return _handled(self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.saves += 1
        if number == signal.SIGTERM:
            self.stop = True
            _stopping.set()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ask_to_stop() -> None:
    """Send this process SIGTERM, unless one has asked it to save and stop already: a second would end it at once."""
    if not _stopping.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def saves_dropped() -> AbstractContextManager[None]:
    """SIGUSR1, which would end the process, does nothing inside."""
    return _handled(lambda number, frame: None, signal.SIGUSR1)


@contextlib.contextmanager
def signals_passed_on(process: subprocess.Popen[str]) -> Iterator[Interrupts]:
    """Send what this process is asked to the ranks that its child is, or has started on this machine.

    A launcher in between would end them by itself, and not wait for a checkpoint. One that has begun nothing to save,
    or a launcher before its ranks, would die of SIGUSR1 and is spared it. Tells what was asked.
    """
    asked = Interrupts()

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.stop = asked.stop or number == signal.SIGTERM
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(process.pid)
            ranks = [other for other in child.children(recursive=True) if _is_rank(other)]
            for rank in ranks or [child]:
                if number == signal.SIGTERM or _handles(rank, number):
                    rank.send_signal(number)

    with _handled(pass_on):
        yield asked


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Signals, both unless some are named, go to a handler inside; only a process's main thread can have one."""
    is_main = threading.current_thread() is threading.main_thread()
    wanted = (numbers or (signal.SIGTERM, signal.SIGUSR1)) if is_main else ()
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "RANK" in process.environ()
    return False


def _handles(process: psutil.Process, number: int) -> bool:
    """Whether a process has a handler for a signal, as far as the system tells."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
        mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
        return bool(int(mask, 16) >> (number - 1) & 1)
    return True
