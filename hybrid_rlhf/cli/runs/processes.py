"""Processes that a command starts: the line of the launcher, their output, and how they ended."""

from __future__ import annotations

import os
import re
import shutil
import subprocess  # starts the commands of this package  # nosec B404
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from hybrid_rlhf.cli.runs.hosts import hosts_environment
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.pipeline import LauncherConfig
from hybrid_rlhf.runtime.command_line import ERROR_FILE, USER_ERROR_CODE, child_environment
from hybrid_rlhf.runtime.host_memory import MALLOC_ENVIRONMENT
from hybrid_rlhf.runtime.liveness.launcher import STARTED_BY
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE, forward_signals
from hybrid_rlhf.runtime.openmp import shared_cores

_ERROR_LINE = re.compile(r"(?:[\w.-]+: )?error: (.*)")
"""A line that reports an error; pdsh puts the host before it."""


def launcher(options: LauncherConfig) -> list[str]:
    """The command, up to the name of a module, that starts the module on these processes."""
    if options.hostfile is not None:
        deepspeed = shutil.which(
            "deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        )
        if deepspeed is None:
            raise UserError("launcher.hostfile needs the command deepspeed, PATH has none: pip install deepspeed")
        return [deepspeed, "--hostfile", options.hostfile, "--no_local_rank", "--module"]
    processes = local_ranks(options)
    if processes == 1:
        return [sys.executable, "-m"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]


def launcher_environment(options: LauncherConfig) -> dict[str, str]:
    """Variables of the launcher, beside those of this process."""
    return hosts_environment() if options.hostfile is not None else shared_cores(local_ranks(options))


def local_ranks(options: LauncherConfig) -> int:
    """Number of processes on this host."""
    return options.num_processes or max(1, _gpus())


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended."""

    code: int
    tail: list[str]
    """The last lines of its output."""
    first_error: str | None = None
    """The first line that reports an error."""
    user_error: str | None = None
    """The user's mistake that ended it."""


def tee(command: list[str], log: Path, base: Mapping[str, str]) -> CommandEnd:
    """Run a command, copy its output to the console and a file.

    `base` is the environment, to which the variables of a step are added.
    """
    with tempfile.TemporaryDirectory(prefix="hybrid_rlhf_") as folder:
        mistake = Path(folder) / "user_error"
        end = _tee(command, log, {**base, ERROR_FILE: str(mistake)})
        if mistake.exists():
            return replace(end, user_error=mistake.read_text(encoding="utf-8"))
        error = _ERROR_LINE.match(end.first_error or "")
        # Ranks on hosts of a hostfile do not get that file; their launcher ends with their exit code.
        return replace(end, user_error=error[1]) if error is not None and end.code == USER_ERROR_CODE else end


def _tee(command: list[str], log: Path, base: Mapping[str, str]) -> CommandEnd:
    tail: deque[str] = deque(maxlen=20)
    first_error: str | None = None
    environment = {**child_environment(base), STARTED_BY: str(os.getpid())}
    if not _gpus():
        environment = {**MALLOC_ENVIRONMENT, **environment}
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(  # a list of arguments, no shell  # nosec B603
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
        )
        assert process.stdout is not None
        with forward_signals(process) as asked:
            sinks: list[TextIO] = [sys.stdout, file]
            for line in process.stdout:
                _pass_on(line, sinks)
                tail.append(line)
                if first_error is None and _ERROR_LINE.match(line):
                    first_error = line
            code = process.wait()
        return CommandEnd(STOPPED_EXIT_CODE if code and asked.stop else code, list(tail), first_error)


def _pass_on(line: str, sinks: list[TextIO]) -> None:
    """Write a line to the console and the log; a step continues without one that fails."""
    for sink in list(sinks):
        try:
            sink.write(line)
            sink.flush()
        except OSError:
            sinks.remove(sink)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())  # the rest of its buffer must not fail at exit
