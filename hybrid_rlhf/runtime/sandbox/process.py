"""A process with a time limit, whose output is cut while it is read."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen  # nosec B404
from typing import IO, Protocol, cast

from hybrid_rlhf.runtime.observability.logs import shortened

BLOCK_BYTES = 65536
POLL_SECONDS = 0.05
"""Interval at which the end of a process is noticed that others keep from closing its output."""
_LAST_OUTPUT_SECONDS = 0.5
"""Time to read what is left in the pipes; a process that outlives the program may hold them open for ever."""
_SIGNALLED = 128
"""Shells and containers add the number of a signal to this in the exit status."""
CPU_LIMIT_SIGNALS = (-signal.SIGXCPU, _SIGNALLED + signal.SIGXCPU)


@dataclass(frozen=True)
class SandboxResult:
    """End of a program."""

    exit_status: int
    """Exit status; negative or above 128: killed by a signal."""
    stdout: str
    stderr: str
    timed_out: bool = False
    """True if it exceeded its time or its processor time, and was killed."""
    truncated: bool = False
    """True if it wrote more than the limit to standard output, whose end is then absent."""
    memory_exceeded: bool = False
    """True if its last words, or the container, say that it had no memory left."""

    @property
    def succeeded(self) -> bool:
        """True if the program ended by itself with exit status 0."""
        return self.exit_status == 0 and not self.timed_out

    @property
    def failure(self) -> str | None:
        """Why the program did not succeed, in one line; None if it did."""
        if self.succeeded:
            return None
        if self.timed_out:
            return "it took longer than its time limit"
        if self.memory_exceeded:
            return "it needed more memory than its limit"
        lines = self.stderr.strip().splitlines()
        return shortened(f"exit status {self.exit_status}" + (f": {lines[-1]}" if lines else ""), limit=300)


class Sandbox(Protocol):
    """Runs programs; several threads call it at once."""

    def run(
        self,
        program: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> SandboxResult:
        """Run the text of a program with a standard input, and with further files in its folder.

        `timeout_seconds` replaces the limit of the config.
        """


class _Kept:
    """The first bytes of a stream, or the last."""

    def __init__(self, limit: int, *, last: bool) -> None:
        self._limit = limit
        self._last = last
        self._bytes = bytearray()
        self.truncated = False

    def add(self, block: bytes) -> None:
        """Keep what has room."""
        self._bytes += block
        excess = len(self._bytes) - self._limit
        if excess > 0:
            self.truncated = True
            del self._bytes[slice(excess) if self._last else slice(self._limit, None)]

    def text(self) -> str:
        """What is kept; bytes that are no UTF-8 are replaced."""
        return self._bytes.decode(errors="replace")


def run_process(
    command: Sequence[str],
    stdin: bytes,
    *,
    env: Mapping[str, str],
    timeout_seconds: float,
    output_bytes: int,
    folder: Path | None = None,
    owner: int | None = None,
    after: Callable[[], None] = lambda: None,
) -> SandboxResult:
    """Run a command in a session of its own, and kill its process group at its end or at the time limit.

    Args:
        command: program and arguments.
        stdin: its standard input.
        env: its environment variables.
        timeout_seconds: time limit.
        output_bytes: first bytes of standard output, and last ones of standard error, that are kept.
        folder: its working folder; None: the current one.
        owner: user of its pipes, who may open them by name (/dev/stdin); None: this user.
        after: called after the process group is killed.
    """
    until = time.monotonic() + timeout_seconds
    with contextlib.ExitStack() as stack:
        (its_stdin, source), (output, its_stdout), (errors, its_stderr) = pipes = [os.pipe() for _ in range(3)]
        written = stack.enter_context(open(source, "wb", buffering=0))
        # The last line of standard error says why a program failed.
        kept: dict[IO[bytes], _Kept] = {
            stack.enter_context(open(end, "rb", buffering=0)): _Kept(output_bytes, last=end == errors)
            for end in (output, errors)
        }
        try:
            if owner is not None:  # before the program starts, which may open one at once
                for end, _ in pipes:
                    os.fchown(end, owner, owner)
            process = Popen(  # a list of arguments, no shell  # nosec B603
                command,
                stdin=its_stdin,
                stdout=its_stdout,
                stderr=its_stderr,
                env=dict(env),
                cwd=folder,
                start_new_session=True,
            )
            stack.enter_context(process)
        finally:
            for end in (its_stdin, its_stdout, its_stderr):
                os.close(end)
        try:
            _exchange(process, written, stdin, kept, until)
            timed_out = not has_ended(process, until)
        finally:
            # The leader is not yet reaped, so its number is still that of the group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            after()
    stdout, stderr = kept.values()
    said = stderr.text()
    has_no_memory = "MemoryError" in said.rstrip().rpartition("\n")[2] or "bad_alloc" in said
    return SandboxResult(
        process.returncode,
        stdout.text(),
        said,
        timed_out=timed_out or process.returncode in CPU_LIMIT_SIGNALS,
        truncated=stdout.truncated,
        memory_exceeded=process.returncode != 0 and has_no_memory,
    )


def _exchange(
    process: Popen[bytes], written: IO[bytes], stdin: bytes, kept: Mapping[IO[bytes], _Kept], until: float
) -> None:
    """Write the standard input and read the output until both are complete, the process has ended, or the time is
    over."""
    os.set_blocking(written.fileno(), False)
    left = memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for stream in kept:
            selector.register(stream, selectors.EVENT_READ)
        selector.register(written, selectors.EVENT_WRITE)
        while selector.get_map() and time.monotonic() < until:
            for key, _ in selector.select(POLL_SECONDS):
                source = cast(IO[bytes], key.fileobj)
                if source is written:
                    left = _written(source, left)
                    is_complete = not left
                else:
                    block = os.read(source.fileno(), BLOCK_BYTES)
                    kept[source].add(block)
                    is_complete = not block
                if is_complete:
                    selector.unregister(source)
                    source.close()
            if has_ended(process):
                until = min(until, time.monotonic() + _LAST_OUTPUT_SECONDS)


def has_ended(process: Popen[bytes], until: float = 0.0) -> bool:
    """Return True if a process has ended by a time, without reaping it."""
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            return False
        time.sleep(0.01)
    return True


def _written(stream: IO[bytes], left: memoryview) -> memoryview:
    """What is left to write; nothing once the reader has closed its end."""
    try:
        return left[os.write(stream.fileno(), left[:BLOCK_BYTES]) :]
    except BrokenPipeError:
        return memoryview(b"")
