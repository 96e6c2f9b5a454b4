"""`hybrid-rlhf serve` in a process of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO

import torch

from hybrid_rlhf.cli.main import main
from tests.support.ranks import FORKSERVER

KEY = "a-key"


class ServerProcess:
    """A process that serves."""

    def __init__(self, process: BaseProcess) -> None:
        """Take a process that has started."""
        self._process = process

    @property
    def pid(self) -> int:
        """Id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout: float) -> int | None:
        """The exit code; None where the process runs for longer than so many seconds."""
        self._process.join(timeout)
        return self._process.exitcode


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
    printed, output = FORKSERVER.Pipe(duplex=False)
    words = ["serve", *line, "--port", "0", "--api_key", "${SERVE_KEY}"]
    process = FORKSERVER.Process(target=_serve, args=(words, before, None if errors is None else errors.name, output))
    process.start()
    output.close()
    try:
        with open(os.dup(printed.fileno())) as lines:
            started = re.fullmatch(r"serving \S+ on (http://127\.0\.0\.1:\d+)/v1\n", lines.readline())
        assert started is not None
        yield ServerProcess(process), started[1]
    finally:
        process.kill()
        process.join()
        printed.close()


def _serve(words: list[str], before: str, errors: str | None, output: Connection) -> None:
    os.dup2(output.fileno(), 1)
    if errors is not None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(SERVE_KEY=KEY, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    exec(before, {})
    main(words)
