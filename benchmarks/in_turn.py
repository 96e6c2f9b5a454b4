"""Processes that train by turns, an update at a time, so that a machine that is slow for a while is slow to all."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.ppo_step import ROOT, peak_gib

_POLL_SECONDS = 0.01


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
