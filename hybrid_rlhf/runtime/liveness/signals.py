"""Requests by signal: SIGTERM and SIGINT save and stop a run, SIGUSR1 saves and continues.

Schedulers send SIGTERM and SIGUSR1 before they reclaim a machine, a terminal sends SIGINT on Ctrl-C. A second SIGTERM
or SIGINT stops at once, also while torch computes, when Python calls no handler: a thread reads the numbers of signals
as they arrive. Outside its loop a run has nothing to save: there SIGUSR1 is ignored, and SIGTERM and SIGINT end the
process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess  # only for a type  # nosec B404
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType

import psutil

STOPPED_EXIT_CODE = 128 + signal.SIGTERM
"""The exit code that a shell reports for a process ended by SIGTERM."""
_stopping = threading.Event()
"""Set once the loop of this process has received SIGTERM or SIGINT."""
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # signals of a child are not this process's


class SignalRequests:
    """Records the received signals."""

    def __init__(self) -> None:
        self.stop = False
        self.saves = 0
        """Number of checkpoints requested."""

    @contextlib.contextmanager
    def catch(self) -> Iterator[None]:
        """Record the signals inside the block instead of their default action; a second of a kind that stops ends the
        process."""
        with _handler_installed(self._record), _second_ends_at_once():
            yield

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.saves += 1
        if number != signal.SIGUSR1:
            self.stop = True
            _stopping.set()


def ask_to_stop() -> None:
    """Send this process SIGTERM, unless it is already stopping: a second signal would end it at once."""
    if not _stopping.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def ignore_save_requests() -> AbstractContextManager[None]:
    """Ignore SIGUSR1, whose default action ends the process, inside the block."""
    return _handler_installed(lambda number, frame: None, signal.SIGUSR1)


@contextlib.contextmanager
def forward_signals(process: subprocess.Popen[str]) -> Iterator[SignalRequests]:
    """Forward signals to the ranks on this host: the child process, or those it has started; SIGINT as SIGTERM.

    Ranks of a hostfile are not below the child, but below the sshd of this host. The child needs a separate session, as
    Ctrl-C would reach it too. A launcher in between would end its ranks without waiting for a checkpoint. SIGUSR1 is
    not sent to a process that does not handle it, such as a rank that is still importing or a launcher without ranks,
    because it would end it.

    Yields:
        the requests received so far; only `stop` is set.
    """
    requests = SignalRequests()

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if not requests.stop:
                _say_that_it_stops()
            number = signal.SIGTERM  # ends a rank that is still importing without a traceback
        requests.stop = requests.stop or number == signal.SIGTERM
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(process.pid)
            ranks = [descendant for descendant in child.children(recursive=True) if _is_rank(descendant)]
            for rank in ranks or _same_command(child) or [child]:
                if number == signal.SIGTERM or _handles(rank, number):
                    rank.send_signal(number)

    with _handler_installed(forward):
        yield requests


@contextlib.contextmanager
def _second_ends_at_once() -> Iterator[None]:
    """End the process at the second SIGTERM or SIGINT inside the block; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    thread = threading.Thread(target=_end_at_the_second, args=(reader,), name="signals", daemon=True)
    thread.start()
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        writer.close()
        thread.join()


def _end_at_the_second(reader: socket.socket) -> None:
    received: set[int] = set()
    with reader:
        while numbers := reader.recv(64):
            for number in numbers:
                if number in received - {signal.SIGUSR1}:
                    os._exit(128 + number)
                received.add(number)
                if number == signal.SIGINT:
                    _say_that_it_stops()


@contextlib.contextmanager
def _handler_installed(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals, by default all three, inside the block; no effect outside the main thread, as Python requires.

    SIGINT stays ignored if it is ignored, as in a script's background job.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    every = (signal.SIGTERM, signal.SIGUSR1, *(() if is_ignored else (signal.SIGINT,)))
    wanted = (numbers or every) if is_main else ()
    previous = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def _say_that_it_stops() -> None:
    """Print one line per host, unbuffered: a signal may arrive while another line is printed."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, b"stopping after this step; a second Ctrl-C ends at once\n")


def _is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "RANK" in process.environ()
    return False


def _same_command(launcher: psutil.Process) -> list[psutil.Process]:
    """The ranks of this host with the module and the settings of a launcher's command."""
    command = launcher.cmdline()[-3:]
    ranks = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != launcher.pid and process.cmdline()[-3:] == command and _is_rank(process):
                ranks.append(process)
    return ranks


def _handles(process: psutil.Process, number: int) -> bool:
    """Return True if a process handles a signal, or if the system does not tell."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
        mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
        return bool(int(mask, 16) >> (number - 1) & 1)
    return True
