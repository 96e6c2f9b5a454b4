"""The hosts of a hostfile before ranks start on them: ssh reaches each, and each sees the files of the run.

Without these checks a host that cannot start its ranks leaves those of the other hosts waiting for them, for as long as
`faults.collective_timeout_seconds`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess  # asks hosts by ssh  # nosec B404
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.hostfile import hosts_of

SSH_ARGUMENTS = "PDSH_SSH_ARGS_APPEND"
"""Environment variable of pdsh with further arguments of ssh."""
LOST_CODE = 255
"""Exit code of ssh, and so of the launcher, when a host does not answer any more."""
RESTART_WAIT_SECONDS = 600.0
"""Time for which a restart waits for a host that starts anew."""
_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
"""ssh ends 20 s after its host has vanished, as the ranks of the other hosts do; by default it waits for ever."""
_ASK = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
_POLL_SECONDS = 1.0


def hosts_environment() -> dict[str, str]:
    """Variables of the launcher of several hosts."""
    return {SSH_ARGUMENTS: f"{os.environ.get(SSH_ARGUMENTS, '')} {_ALIVE}".strip()}


def require_hosts(hostfile: str, files: Sequence[Path], *, seconds: float) -> None:
    """Wait until every host answers ssh and sees the files.

    Raises:
        UserError: that names a host, if one does not within the time.
    """
    hosts = [*hosts_of(hostfile)]
    for program, package in (("ssh", "openssh-client"), ("pdsh", "pdsh")):
        if shutil.which(program) is None:
            raise UserError(
                f"launcher.hostfile needs the command {program}, PATH has none: install it, for example apt-get "
                f"install {package}"
            )
    until = time.monotonic() + seconds
    while faults := _faults(hosts, files):
        if time.monotonic() > until:
            raise UserError(next(iter(faults.values())))
        time.sleep(_POLL_SECONDS)


def _faults(hosts: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """What is wrong with a host, by host."""
    needed = [Path(sys.executable), *(file.resolve() for file in files)]
    words = [shlex.quote(str(file)) for file in needed]
    tests = "; ".join(f"test -e {word} || {{ echo {word}; exit 1; }}" for word in words)
    options = [*_ASK, *shlex.split(os.environ.get(SSH_ARGUMENTS, ""))]
    asked = {
        host: subprocess.Popen(  # a list of arguments, no local shell  # nosec
            ["ssh", *options, host, tests],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for host in hosts
    }
    faults = {}
    for host, process in asked.items():
        said, errors = process.communicate()
        if process.returncode == LOST_CODE:
            reason = (errors.strip().splitlines() or ["no answer"])[-1].strip()
            faults[host] = (
                f"launcher.hostfile needs ssh without a password to every host, {host} does not answer ({reason}): "
                f"check ssh {host} hostname"
            )
        elif process.returncode:
            faults[host] = (
                "all hosts need the same software and output_dir at the same paths, on a file system that they share: "
                f"{host} does not have {said.strip() or needed[0]}: install it there, or set another output_dir"
            )
    return faults
