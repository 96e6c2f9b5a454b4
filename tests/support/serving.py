"""`hybrid-rlhf serve` in a process of its own."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

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
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> int | None:
        """The exit code; None where the process runs for longer than so many seconds."""
        self._process.join(timeout)
        return self._process.exitcode


def server_process(
    line: str, *, before: str = "", errors: IO[str] | None = None
) -> AbstractContextManager[tuple[ServerProcess, str]]:
    """A server on a free port, whose key is KEY, and its URL; killed at the end.

    Args:
        line: of the command.
        before: Python code that the process runs first.
        errors: where its standard error goes; none: that of the test.
    """
    words = ["serve", *shlex.split(line), "--port", "0", "--api_key", "${SERVE_KEY}"]
    arguments = (words, before, None if errors is None else errors.name)
    return printing_process(_serve, arguments, r"serving \S+ on (http://127\.0\.0\.1:\d+)/v1\n")


@contextmanager
def printing_process(
    target: Callable[..., None], arguments: Sequence[Any], line: str
) -> Iterator[tuple[ServerProcess, str]]:
    """A process and the first group of its first line of output, which a pattern matches; killed at the end.

    `target` is called with the arguments and the connection that its output is to be written to.
    """
    printed, output = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=target, args=(*arguments, output))
    process.start()
    output.close()
    try:
        with open(os.dup(printed.fileno())) as lines:
            started = re.fullmatch(line, lines.readline())
        assert started is not None
        yield ServerProcess(process), started[1]
    finally:
        process.kill()
        process.join()
        printed.close()


def learn_by_heart(model: PreTrainedModel, ids: Tensor, *, answer_begins: int) -> None:
    """Train a tiny model until it continues the first of these tokens with the others."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(300):
        loss = cross_entropy(model(ids[None]).logits[0, answer_begins - 1 : -1], ids[answer_begins:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.01:
            break
    assert loss < 0.1


def _serve(words: list[str], before: str, errors: str | None, output: Connection) -> None:
    os.dup2(output.fileno(), 1)
    if errors is not None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(SERVE_KEY=KEY, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    exec(before, {})
    main(words)
