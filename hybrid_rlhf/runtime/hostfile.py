"""The hostfile of DeepSpeed's launcher, and the number of processes that it starts."""

from __future__ import annotations

import re

from hybrid_rlhf.configs.pipeline import LauncherConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.runtime.files.reading import read_text

SHARED_SECONDS = 10.0
"""Time in which a network file system shows a new file to all hosts."""


def process_count(launcher: LauncherConfig) -> tuple[int | None, str]:
    """Number of processes on all machines, None for one per GPU of this machine; and the setting that determines it."""
    if launcher.hostfile is None:
        return launcher.num_processes, f"launcher.num_processes {launcher.num_processes}"
    hosts = hosts_of(launcher.hostfile)
    words = f"launcher.hostfile {launcher.hostfile} with {len(hosts)} host{'s' * (len(hosts) > 1)}"
    return sum(hosts.values()), words


def hosts_of(path: str) -> dict[str, int]:
    """Slots by host, in DeepSpeed's format: `HOST slots=N` per line, each host once.

    Raises:
        UserError: for a file that is missing or has another form.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(read_text(path, "launcher.hostfile must name a file").splitlines(), start=1):
        words = line.partition("#")[0].split()
        require(
            not words or (len(words) == 2 and re.fullmatch(r"slots=[1-9]\d{0,4}", words[1]) is not None),
            f"{path}:{number}: a line of a hostfile is `HOST slots=N`, got {line!r}: fix it",
        )
        if words:
            require(words[0] not in hosts, f"{path}:{number}: a host is given once, {line!r} repeats one: keep one")
            hosts[words[0]] = int(words[1].removeprefix("slots="))
    require(bool(hosts), f"launcher.hostfile must name hosts, {path} has none: write `HOST slots=N` lines")
    return hosts
