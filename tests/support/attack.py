"""A server in a process with limits of memory and descriptors; what others wait for while it is attacked, and what the
attack leaves in it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.support.clock import wait_until
from tests.support.ranks import FORKSERVER
from tests.support.runs import ENVIRONMENT, ROOT

_DESCRIPTORS = 1024
_ADDRESS_BYTES = 12 * 2**30
_PAUSE_SECONDS = 0.05
_QUIET_SECONDS = 2.0
_MIB = 2**20
Asks = Mapping[str, Callable[[], object]]
"""What others ask, by name."""


def ask(
    url: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, timeout: float = 120.0
) -> tuple[int, bytes]:
    """Status and content of an answer to a GET, or a POST of a body, on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    try:
        connection.request("GET" if body is None else "POST", path, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _yield_processor() -> None:
    """Let this thread, and those that it starts, use what others leave: an attack comes from another machine."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _watch(asks_of: Callable[[str], Asks], url: str, file: Path) -> None:
    """Ask again and again, each in a thread, and write how long each answer takes."""
    with file.open("w", buffering=1) as lines:

        def repeat(name: str, one: Callable[[], object]) -> None:
            while True:
                start = time.monotonic()
                problem = ""
                try:
                    one()
                except Exception as error:  # noqa: BLE001 - the test that reads it fails
                    problem = f"{name}: {error!r:.300}"
                entry = {"name": name, "start": start, "seconds": time.monotonic() - start, "problem": problem}
                lines.write(json.dumps(entry) + "\n")
                time.sleep(_PAUSE_SECONDS)

        threads = [threading.Thread(target=repeat, args=entry) for entry in asks_of(url).items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class Row:
    """What an attack has cost."""

    name: str
    seconds: float
    before: Mapping[str, float]
    """Longest wait of each of those who ask, in the seconds before it."""
    waits: Mapping[str, float]
    """Longest wait of each meanwhile."""
    problems: Sequence[str]
    peak_mib: float
    """Largest memory of the server and its processes, above that before."""
    left_mib: float
    """Memory afterwards, above that before."""
    disk_mib: float
    log_bytes: int


def write_table(rows: Sequence[Row], file: Path) -> None:
    """Write a table in Markdown."""
    names = list(rows[0].waits)
    columns = [
        "attack",
        "s",
        *(f"{name}: before, then" for name in names),
        "peak MiB",
        "left MiB",
        "disk MiB",
        "log kB",
    ]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        waits = [f"{row.before[name]:.2f}, {row.waits[name]:.2f}" for name in names]
        sizes = [f"{row.peak_mib:.0f}", f"{row.left_mib:.0f}", f"{row.disk_mib:.1f}", f"{row.log_bytes / 1000:.0f}"]
        lines.append([row.name, f"{row.seconds:.1f}", *waits, *sizes])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


@dataclass
class Target:
    """A server, and others who ask it."""

    process: psutil.Process
    url: str
    folder: Path
    log: Path
    waits: Path
    names: Sequence[str]
    rows: list[Row] = field(default_factory=list)

    def memory(self) -> float:
        """MiB of the server and its processes."""
        total = 0
        for process in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / _MIB

    def disk(self) -> float:
        """MiB of the server's folder."""
        return sum(file.stat().st_blocks * 512 for file in self.folder.rglob("*")) / _MIB

    def measured(self, name: str, attack: Callable[[], object]) -> Row:
        """Attack, and measure what others wait for until two seconds later."""
        quiet = time.monotonic()
        time.sleep(_QUIET_SECONDS)
        before, disk, log = self.memory(), self.disk(), self.log.stat().st_size
        peak = before
        own = Path(f"/proc/{self.process.pid}")
        (own / "clear_refs").write_text("5")  # forgets the largest memory so far
        ended = threading.Event()

        def follow() -> None:
            nonlocal peak
            while not ended.wait(_PAUSE_SECONDS):
                peak = max(peak, self.memory())

        thread = threading.Thread(target=follow)
        thread.start()
        start = time.monotonic()
        try:
            with ThreadPoolExecutor(1, initializer=_yield_processor) as sender:
                sender.submit(attack).result()
            seconds = time.monotonic() - start
            time.sleep(_QUIET_SECONDS)
            asked = self._asked(quiet)
        finally:
            ended.set()
            thread.join()
        highest = re.search(r"VmHWM:\s*(\d+) kB", (own / "status").read_text())
        assert highest is not None
        row = Row(
            name,
            seconds,
            self._longest([entry for entry in asked if entry["start"] + entry["seconds"] < start]),
            self._longest([entry for entry in asked if entry["start"] + entry["seconds"] >= start]),
            [entry["problem"] for entry in asked if entry["problem"]],
            max(peak, int(highest[1]) / 1024) - before,
            self.memory() - before,
            self.disk() - disk,
            self.log.stat().st_size - log,
        )
        self.rows.append(row)
        print(row, flush=True)
        return row

    def _longest(self, asked: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return {name: max(entry["seconds"] for entry in asked if entry["name"] == name) for name in self.names}

    def _asked(self, since: float) -> list[dict[str, Any]]:
        """What others have asked since then, when those who ask now have an answer."""
        now = time.monotonic()

        def entries() -> list[dict[str, Any]]:
            return [json.loads(line) for line in self.waits.read_text().splitlines(keepends=True) if line[-1:] == "\n"]

        def are_there() -> bool:
            last = {entry["name"]: entry["start"] for entry in entries()}
            return all(last.get(name, 0.0) >= now for name in self.names)

        wait_until(are_there, "an answer", seconds=300)
        return [entry for entry in entries() if entry["start"] + entry["seconds"] >= since]


@contextlib.contextmanager
def target(
    words: Sequence[str], folder: Path, asks_of: Callable[[str], Asks], names: Sequence[str], **environment: str
) -> Iterator[Target]:
    """A server that a command starts, which others ask.

    Args:
        words: of the command.
        folder: where its files are; it is made.
        asks_of: makes what others ask, by name, from the URL of the server.
        names: their names.
        environment: further variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    limits = ["prlimit", f"--as={_ADDRESS_BYTES}", f"--nofile={_DESCRIPTORS}:{_DESCRIPTORS}"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*limits, sys.executable, "-m", "hybrid_rlhf", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**ENVIRONMENT, **environment},
            cwd=ROOT,
        )
    try:
        assert process.stdout is not None
        started = re.search(r" on (http://127\.0\.0\.1:\d+)", process.stdout.readline())
        assert started is not None, log.read_text()
        waits = folder.with_suffix(".jsonl")
        watching = FORKSERVER.Process(target=_watch, args=(asks_of, started[1], waits))
        watching.start()
        try:
            wait_until(lambda: waits.exists() and len(waits.read_text().splitlines()) > 5, "an answer")
            yield Target(psutil.Process(process.pid), started[1], folder, log, waits, names)
        finally:
            watching.kill()
            watching.join()
        assert process.poll() is None, "the server has ended"
    finally:
        process.terminate()
        try:
            process.wait(timeout=40)
        finally:
            process.kill()
            process.wait()
