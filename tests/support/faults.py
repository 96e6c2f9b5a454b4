"""Faults: ranks of a step that are killed or signalled at a chosen call of a chosen function, files that fill up."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from tests.support.ranks import FORKSERVER, enter, environment


@dataclass(frozen=True)
class Point:
    """A moment in a run."""

    place: str
    """module:function or module:Class.method."""
    call: int = 1
    """Which call of it."""
    rank: int | None = 0
    when: str = "before"
    signal: int = signal.SIGKILL

    def __str__(self) -> str:
        name = self.place.rpartition(":")[2]
        return f"{self.when}-{name}-{self.call}-rank{self.rank}"

    def arm(self) -> None:
        """Replace the function by one that sends the signal to this process."""

        def around(call: int, run: Callable[[], Any], _: Sequence[Any]) -> Any:
            now = call == self.call
            if now and self.when == "before":
                os.kill(os.getpid(), self.signal)
            result = run()
            if now and self.when == "after":
                os.kill(os.getpid(), self.signal)
            return result

        intercept(self.place, around)


def intercept(place: str, around: Callable[[int, Callable[[], Any], Sequence[Any]], Any]) -> None:
    """Put `around` in the place of a function, module:function or module:Class.method.

    It is given the number of the call, the call itself to be made or not, and the arguments.
    """
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), count(1)

    @functools.wraps(real)
    def intercepted(*arguments: Any, **named: Any) -> Any:
        return around(next(calls), lambda: real(*arguments, **named), arguments)

    setattr(owner, name, intercepted)


class Armed(Protocol):
    """Something done to a rank before its step starts."""

    rank: int | None
    """Which; none: all."""

    def arm(self) -> None:
        """Do it."""


def run_step(
    module: str,
    ranks: int,
    line: Sequence[str],
    armed: Armed | None = None,
    *,
    errors: Path | None = None,
    limit_seconds: float = 900,
) -> list[int]:
    """A step's main on gloo ranks, and their exit codes; when one is killed the others are too, as machines fail.

    Their standard error goes to the file `errors`, if one is named.
    """
    variables, arguments = environment(ranks), (module, list(line), armed, errors)
    processes = [FORKSERVER.Process(target=enter, args=(rank, variables, _main, arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_seconds
    while any(process.is_alive() for process in processes):
        late = time.monotonic() > deadline
        if late or any(process.exitcode == -signal.SIGKILL for process in processes):
            for process in processes:
                process.kill()
        if late:
            raise TimeoutError(f"{module} {armed} was not done within {limit_seconds} s")
        time.sleep(0.02)
    return [process.exitcode or 0 for process in processes]


def _main(rank: int, module: str, line: list[str], armed: Armed | None, errors: Path | None) -> None:
    if errors is not None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if armed is not None and armed.rank in (None, rank):
        armed.arm()
    import_module(module).main(line)


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel accepts no byte beyond this size: the write that reaches it is short, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
