"""`hybrid-rlhf serve` in a process of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import IO

import torch

from hybrid_rlhf.cli.main import main
from tests.support.ranks import FORKSERVER

KEY = "a-key"


class ServerProcess:
    """A process that serves."""

    def __init__(self, line: Sequence[str], before: str, errors: str | None) -> None:
        """Start a process, and wait for the line that it prints when it listens."""
        reader, writer = FORKSERVER.Pipe(duplex=False)
        self._process = FORKSERVER.Process(target=_serve, args=(list(line), before, errors, writer))
        self._process.start()
        writer.close()
        with open(os.dup(reader.fileno())) as printed:
            started = re.fullmatch(r"serving \S+ on (http://127\.0\.0\.1:\d+)/v1\n", printed.readline())
        assert started is not None
        self._reader = reader  # who prints into a closed pipe is ended
        self.url = started[1]

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout: float) -> int | None:
        """The exit code, None if the process runs longer than the timeout in seconds."""
        self._process.join(timeout)
        return self._process.exitcode

    def end(self) -> None:
        """Kill the process if it runs."""
        self._process.kill()
        self._process.join()
        self._reader.close()


def _serve(line: list[str], before: str, errors: str | None, writer: Connection) -> None:
    os.dup2(writer.fileno(), 1)
    if errors is not None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    os.environ |= {"SERVE_KEY": KEY, "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    exec(before)
    main(["serve", *line])


@contextmanager
def server_process(
    line: Sequence[str], *, before: str = "", errors: IO[str] | None = None
) -> Iterator[tuple[ServerProcess, str]]:
    """A server on a free port, whose key is KEY, and its URL; killed at the end.

    Args:
        line: of the command.
        before: Python code that the process runs first.
        errors: where its standard error goes; none: that of the test.
    """
    words = [*line, "--port", "0", "--api_key", "${SERVE_KEY}"]
    process = ServerProcess(words, before, None if errors is None else errors.name)
    try:
        yield process, process.url
    finally:
        process.end()
