"""Stops a rank whose launcher has died, so that it releases its GPU and its run folder.

torchrun, the DeepSpeed launcher and `train.py` end their ranks when they receive a signal that can be caught. SIGKILL
cannot be caught, and the ranks keep running. A thread of every rank therefore checks once per second that the processes
that started it are alive; if one is not, it sends SIGTERM to its own process, so that the loop saves and stops
(signals.py). All ranks of that launcher do so, and the other ranks of the run stop with them.

A process started from a shell has no launcher: `nohup python training/step1_sft/main.py &` outlives its shell.

The kernel's parent-death signal (prctl) is not sufficient: it exists only on Linux, follows the thread that forked, and
covers neither `train.py`, which may be the grandparent, nor the two processes of the DeepSpeed launcher.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Sequence

import psutil

from hybrid_rlhf.runtime.liveness.signals import ask_to_stop
from hybrid_rlhf.runtime.observability.logs import logger

STARTED_BY = "HYBRID_RLHF_STARTED_BY"
"""Environment variable with the process id of `train.py`, set for the processes that it starts on its host."""
# Environment variables that only the respective launcher sets for its ranks.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_DEEPSPEED = "CROSS_RANK"
_POLL_SECONDS = 1.0


@functools.cache
def stop_with_launcher() -> None:
    """Stop this process with SIGTERM when its launcher dies; does nothing for a process without a launcher.

    Call it as early as possible: a launcher that dies before the call is not detected. Later calls do nothing.
    """
    if not any(name in os.environ for name in (STARTED_BY, _TORCHRUN, _DEEPSPEED)):
        return
    started_by = os.environ.pop(STARTED_BY, None)  # child processes do not belong to that launcher
    try:
        launchers = _launchers(None if started_by is None else int(started_by))
    except psutil.NoSuchProcess:
        _stop()
        return
    threading.Thread(target=_watch, args=(launchers,), name="launcher", daemon=True).start()


def _launchers(started_by: int | None) -> list[psutil.Process]:
    """The processes whose death stops this one.

    Raises:
        psutil.NoSuchProcess: if one is already dead.
    """
    processes = [] if started_by is None else [psutil.Process(started_by)]
    if _TORCHRUN in os.environ or _DEEPSPEED in os.environ:
        processes.append(psutil.Process(os.getppid()))
    if _DEEPSPEED in os.environ:  # one process per host, and the command that started it
        command = processes[-1].parent()
        with contextlib.suppress(psutil.AccessDenied):
            processes += [command] if command is not None and "deepspeed" in " ".join(command.cmdline()) else []
    return processes


def _watch(launchers: Sequence[psutil.Process]) -> None:
    while all(_is_alive(process) for process in launchers):
        time.sleep(_POLL_SECONDS)
    _stop()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:  # it exists, but may not be inspected
        return True
    except psutil.NoSuchProcess:
        return False


def _stop() -> None:
    # Every rank logs this: the first that detects it stops all others.
    logger.warning("the launcher of this run has died: stopping as for SIGTERM")
    ask_to_stop()
