"""Stops a rank whose launcher has died, so that it does not hold its GPU and its run's folder on its own.

torchrun, the DeepSpeed launcher and `train.py` end their ranks when a signal lets them. SIGKILL does not, and the
kernel leaves the ranks running. A thread of every rank therefore looks once a second whether the processes that started
it still live, and sends its own process SIGTERM when one does not: in a loop that saves and stops (interrupts.py).
All ranks of a launcher do so, and the others of the run stop with them.

A process that a shell started has no launcher: `nohup python training/step1_sft/main.py &` outlives its shell.

The kernel's parent-death signal (prctl) would not do: it exists on Linux alone, follows the thread that forked, and
covers neither `train.py`, which may be two processes up, nor the two processes of the DeepSpeed launcher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence

import psutil

from hybrid_rlhf.runtime.interrupts import ask_to_stop

STARTED_BY = "HYBRID_RLHF_STARTED_BY"
"""Names the process of `train.py`, to what it starts on its machine."""
_TORCHRUN, _DEEPSPEED = "TORCHELASTIC_RUN_ID", "CROSS_RANK"
"""Variables that one launcher alone sets for its ranks."""
_TICK_SECONDS = 1.0
_LOGGER_NAME = "hybrid_rlhf"
"""As in logs.py, which imports torch: this module comes before it."""
_watching = threading.Lock()


def stop_with_launcher() -> None:
    """Stop this process, by SIGTERM, when its launcher dies; nothing for a process without one.

    Call it as early as possible: a launcher that dies before is not known. Later calls do nothing.
    """
    if not _is_launched() or not _watching.acquire(blocking=False):
        return
    started_by = os.environ.pop(STARTED_BY, None)  # what this process starts is not of that launcher
    try:
        launchers = _launchers(None if started_by is None else int(started_by))
    except psutil.NoSuchProcess:
        _stop()
        return
    threading.Thread(target=_watch, args=(launchers,), name="launcher", daemon=True).start()


def _is_launched() -> bool:
    return any(name in os.environ for name in (STARTED_BY, _TORCHRUN, _DEEPSPEED))


def _launchers(started_by: int | None) -> list[psutil.Process]:
    """The processes without which this one is to stop.

    Raises:
        psutil.NoSuchProcess: when one is dead already.
    """
    found = [] if started_by is None else [psutil.Process(started_by)]
    if _TORCHRUN in os.environ or _DEEPSPEED in os.environ:
        found.append(psutil.Process(os.getppid()))
    if _DEEPSPEED in os.environ:  # one process for each host, and the command that started it
        command = found[-1].parent()
        with contextlib.suppress(psutil.AccessDenied):
            found += [command] if command is not None and "deepspeed" in " ".join(command.cmdline()) else []
    return found


def _watch(launchers: Sequence[psutil.Process]) -> None:
    while all(_lives(process) for process in launchers):
        time.sleep(_TICK_SECONDS)
    _stop()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _stop() -> None:
    # Every rank says so: the first that notices stops them all.
    logging.getLogger(_LOGGER_NAME).warning("the launcher of this run has died: stopping as by SIGTERM")
    ask_to_stop()
