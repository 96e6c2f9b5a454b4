"""Processes that are measured: by turns, an update at a time, so that a machine that is slow for a while is slow to
all; and what whole steps of several sides have in common.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_POLL_SECONDS = 0.01


@dataclass
class Side:
    """What one side measured: a list holds a figure a step, peaks a figure a process."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """Real tokens."""
    mean_length: list[float] = field(default_factory=list)
    """Tokens of a completion."""
    unfinished: list[float] = field(default_factory=list)
    peak_gib: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    def add(self, phases: Mapping[str, float], *, tokens: float, length: float) -> None:
        """A step, which takes the sum of its phases."""
        self.seconds.append(sum(phases.values()))
        self.tokens.append(tokens)
        self.mean_length.append(length)
        for name, seconds in phases.items():
            self.phases.setdefault(name, []).append(seconds)

    @property
    def speed(self) -> float:
        """Real tokens a second, the median step's."""
        return statistics.median(t / s for t, s in zip(self.tokens, self.seconds, strict=True))


class InTurn:
    """A process that rests but for `update`: it tells of each update by a mark in a file of its own."""

    def __init__(
        self, command: list[str], *, log: Path, progress: Path, mark: str, environment: Mapping[str, str]
    ) -> None:
        """Start it, and let it rest.

        Args:
            command: of the process.
            log: what it prints is written to.
            progress: file that it writes to.
            mark: text that is there once for each update.
            environment: all of its environment.
        """
        self.seconds: list[float] = []
        self.peak_gib = 0.0
        """The most that was resident when an update ended."""
        self._log, self._progress, self._mark = log, progress, mark
        self._command = command
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=dict(environment), cwd=ROOT)
        self._process.send_signal(signal.SIGSTOP)

    def update(self) -> None:
        """Let it run until it tells of one update more; the first has the start of the process in it."""
        start = time.perf_counter()
        self._process.send_signal(signal.SIGCONT)
        while self._updates() <= len(self.seconds):
            if self._process.poll() is not None:
                self._fail()
            time.sleep(_POLL_SECONDS)
        self.seconds.append(time.perf_counter() - start)
        self._process.send_signal(signal.SIGSTOP)
        self.peak_gib = max(self.peak_gib, peak_gib(self._process.pid))

    def finish(self) -> str:
        """Let it run to its end; the last line that it printed."""
        self._process.send_signal(signal.SIGCONT)
        if self._process.wait():
            self._fail()
        return self._log.read_text().splitlines()[-1]

    def kill(self) -> None:
        """Whatever it is doing."""
        self._process.kill()
        self._process.wait()

    def _updates(self) -> int:
        return self._progress.read_text().count(self._mark) if self._progress.exists() else 0

    def _fail(self) -> None:
        raise SystemExit(f"{' '.join(self._command)} failed:\n{self._log.read_text()[-4000:]}")


def peak_gib(process_id: int) -> float:
    """The most that has been resident; 0 of a process that just ended."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20 if "VmHWM:" in status else 0.0


def environment(threads: int, *, gpu: bool = False) -> dict[str, str]:
    """Of the measured processes: a number of threads for each, and no GPU unless it is asked for."""
    return {
        **os.environ,
        **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def words(settings: Mapping[str, Any]) -> list[str]:
    """Options of a command line."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def write_result(options: argparse.Namespace, versions: Mapping[str, str], **figures: Any) -> None:
    """Write figures as JSON to --json, if given, with what ran; the versions are those of a peer."""
    if options.json:
        own = {name: version(name) for name in ("torch", "transformers")}
        ran = {"options": vars(options), "platform": platform.platform(), **own, "trl_versions": versions}
        Path(options.json).write_text(json.dumps({**ran, **figures}, indent=1) + "\n")


def add_shared_options(parser: argparse.ArgumentParser, *, trl: str) -> None:
    """Options of all scripts that measure TRL, of a version, beside this project."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl_python", help=f"python of an environment with TRL {trl}")
    parser.add_argument("--json", help="file for the raw figures")


def versions_line(versions: Mapping[str, str]) -> str:
    """The packages of TRL's environment."""
    return "TRL ran with " + ", ".join(f"{name} {number}" for name, number in versions.items())
