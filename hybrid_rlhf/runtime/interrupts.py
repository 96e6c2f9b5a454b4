"""What the system or a person asks of a run by signal: SIGTERM, save and stop; SIGUSR1, save and go on.

Schedulers send them before they take a machine away. A second SIGTERM stops at once.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess  # for a type alone  # nosec B404
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import psutil

STOPPED_EXIT_CODE = 128 + signal.SIGTERM
"""What a shell calls the exit code of a process that SIGTERM ended."""


class Interrupts:
    """Remembers what was asked for."""

    def __init__(self) -> None:
        self.stop = False
        self.saves = 0
        """How often a checkpoint was."""

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals; only a process's main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with _handled(self._note):
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.saves += 1
        if number == signal.SIGTERM:
            self.stop = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def signals_passed_on(process: subprocess.Popen[str]) -> Iterator[Interrupts]:
    """Send what this process is asked to the ranks that its child is, or has started on this machine.

    A launcher in between would end them by itself, and not wait for a checkpoint. Tells what was asked.
    """
    asked = Interrupts()

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.stop = asked.stop or number == signal.SIGTERM
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(process.pid)
            ranks = [other for other in child.children(recursive=True) if _is_rank(other)]
            for rank in ranks or [child]:
                rank.send_signal(number)

    with _handled(pass_on):
        yield asked


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Both signals go to a handler inside."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "RANK" in process.environ()
    return False
