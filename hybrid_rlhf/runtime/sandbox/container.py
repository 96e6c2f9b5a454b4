"""A container that stays: files and processes of one episode, with a shell whose state lasts until it is closed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired  # nosec B404

from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.runtime.sandbox.process import (
    BLOCK_BYTES,
    CPU_LIMIT_SIGNALS,
    POLL_SECONDS,
    SandboxResult,
    has_ended,
    run_process,
)

START_SECONDS = 30.0
"""Time in which a container starts or ends."""
BASH = ("bash", "--norc", "--noprofile")
STAY = (*BASH, "-c", "trap '' HUP INT QUIT TERM ALRM USR1 USR2; echo ready; while read -r _; do :; done")
"""Process 1: waits for the end of its input, which the run holds open. Bash reaps orphans meanwhile."""
_KILL = """
kill -KILL -1 2>/dev/null
left() {
  for folder in /proc/[0-9]*; do
    case ${folder#/proc/} in 1 | $$) continue ;; esac
    while read -r key state _; do
      case $key$state in State:[!XZ]*) return 0 ;; esac
    done <"$folder/status"
  done
  return 1
} 2>/dev/null
while left; do :; done
"""
"""kill(2) ends all at once, without itself and process 1, so that none can start others meanwhile. One may still be in
a system call, such as the one that empties a file: waits until none is left. Forks nothing, as there may be no room."""
_starter = ThreadPoolExecutor(1, thread_name_prefix="containers")
"""A process may end with the thread that started it (PR_SET_PDEATHSIG): this one stays."""


class ContainerEnded(Exception):
    """A container does not start, or has ended."""


def start_container(words: Sequence[str], env: Mapping[str, str]) -> Popen[bytes]:
    """Start words that run `STAY` in a new container, and wait until it does.

    Raises:
        ContainerEnded: if it does not.
    """
    process = _started(words, env)
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline() if selector.select(START_SECONDS) else b"it is late"
    if line != b"ready\n":
        _end(process)
        raise ContainerEnded(f"a container with bash must start, it does not: {line.decode(errors='replace').strip()}")
    return process


class Container:
    """Commands run in it until `close`. One thread at a time uses it; any may close it."""

    def __init__(
        self,
        config: SandboxConfig,
        process: Popen[bytes],
        enter: Sequence[str],
        *,
        env: Mapping[str, str],
        owner: int | None = None,
        remove: Callable[[], None],
    ) -> None:
        """Take a container that has started.

        Args:
            config: limits of a command.
            process: of `start_container`.
            enter: words before a command that runs in it.
            env: environment variables of these words.
            owner: user of a command's pipes; None: this user.
            remove: ends it with all its processes.
        """
        self._config = config
        self._process = process
        self._enter = enter
        self._remove = remove
        self._start = partial(_started, [*enter, *BASH], env)
        self._run = partial(run_process, env=env, owner=owner)
        self._shell: Popen[bytes] | None = None

    @property
    def has_shell(self) -> bool:
        """True if the shell of the last command goes on."""
        return self._shell is not None

    def run(self, command: str, *, stdin: str = "", output_bytes: int | None = None) -> SandboxResult:
        """Run a command in a new shell beside the other; if it exceeds its time, all processes of the container end."""
        result = self._run(
            [*self._enter, *BASH, "-c", command],
            stdin.encode(errors="replace"),
            timeout_seconds=self._config.timeout_seconds,
            output_bytes=output_bytes or self._config.output_bytes,
        )
        if result.timed_out:
            self.kill()
        return result

    def shell(self, command: str) -> SandboxResult:
        """Run a command in the shell that stays. Its output is one stream, which lacks its middle if it is too long.

        If the command exceeds its time or ends the shell, all processes of the container end.

        Raises:
            ContainerEnded: if the container has ended.
        """
        if self._shell is None:
            self._shell = self._start()
        shell, mark = self._shell, secrets.token_hex(16)
        quoted = shlex.quote(command.replace("\0", ""))
        # What redirects the shell itself (exec >file) is undone at the end of eval.
        text = f"exec 9>&1\neval {quoted} </dev/null >&9 2>&9\nprintf '\\n%s %d\\n' {mark} $?\n"
        output, left_out, status = self._exchange(shell, text.encode(errors="replace"), mark)
        timed_out = status is None and not has_ended(shell)
        if status is None:
            self.kill()
            status = shell.returncode
            timed_out = timed_out or status in CPU_LIMIT_SIGNALS
        half = self._config.output_bytes // 2
        shown = output.decode(errors="replace")
        if left_out:
            ends = (output[part].decode(errors="replace") for part in (slice(half), slice(half, None)))
            shown = f"\n[{left_out} bytes left out]\n".join(ends)
        return SandboxResult(status, shown, "", timed_out=timed_out, truncated=left_out > 0)

    def _exchange(self, shell: Popen[bytes], text: bytes, mark: str) -> tuple[bytearray, int, int | None]:
        """Output before the mark, bytes left out in its middle, and the status after the mark; None if the time is
        over or the shell has ended."""
        assert shell.stdin is not None and shell.stdout is not None
        config, end = self._config, re.compile(rf"\n{mark} (\d+)\n".encode())
        left, output, left_out = memoryview(text), bytearray(), 0
        until = time.monotonic() + config.timeout_seconds
        os.set_blocking(shell.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(shell.stdout, selectors.EVENT_READ)
            selector.register(shell.stdin, selectors.EVENT_WRITE)
            while time.monotonic() < until:
                ended = has_ended(shell)  # before what it wrote last is read
                ready = [key.fileobj for key, _ in selector.select(POLL_SECONDS)]
                if shell.stdin in ready:
                    with contextlib.suppress(BrokenPipeError):
                        left = left[os.write(shell.stdin.fileno(), left[:BLOCK_BYTES]) :]
                    if not left or ended:
                        selector.unregister(shell.stdin)
                block = os.read(shell.stdout.fileno(), BLOCK_BYTES) if shell.stdout in ready else b""
                output += block
                status = None
                if (found := end.search(output)) is not None:
                    status = int(found[1])
                    del output[found.start() :]
                excess = len(output) - config.output_bytes - len(mark) - 16  # the end may be that of the mark
                if excess > 0:
                    half, left_out = config.output_bytes // 2, left_out + excess
                    del output[half : half + excess]
                if status is not None:
                    return output, left_out, status
                if not block and ended:
                    break
        return output, left_out, None

    def write(self, files: Mapping[str, str]) -> None:
        """Write files, by names relative to the home, instead of what is there.

        Raises:
            OSError: if the container has no room.
        """
        for name, text in files.items():
            place = shlex.quote(name)  # which a program may have made a link
            self._required(f'rm -rf -- {place} && mkdir -p -- "$(dirname -- {place})" && cat >{place}', stdin=text)

    def read(self, name: str) -> str:
        """The text of a file.

        Raises:
            OSError: if there is none, or it is longer than `output_bytes`.
        """
        return self._required(f"cat -- {shlex.quote(name)}")

    def snapshot(self) -> str:
        """All files of the home, for `restore` in this or another container.

        Raises:
            OSError: if they cannot be read.
        """
        archive_bytes = round(2 * self._config.disk_gib * 2**30) + 2**20
        return self._required(
            "find . -mindepth 1 -maxdepth 1 -print0 | tar --one-file-system --null -T - -cf - | base64",
            output_bytes=archive_bytes,
        )

    def restore(self, snapshot: str) -> None:
        """Write the files of a snapshot over those that are there.

        Raises:
            OSError: if the container has no room.
        """
        self._required("base64 -d | tar -xf -", stdin=snapshot)

    def kill(self) -> None:
        """End all processes; files stay.

        Raises:
            ContainerEnded: if the container has ended.
        """
        words = [*self._enter, "sh", "-c", _KILL]
        result = self._run(words, b"", timeout_seconds=START_SECONDS, output_bytes=BLOCK_BYTES)
        if self._shell is not None:
            _end(self._shell)
            self._shell = None
        if not result.succeeded:
            raise ContainerEnded(f"the container of a shell has ended ({result.failure})")

    def close(self) -> None:
        """End all processes and remove all files."""
        self._remove()
        with contextlib.suppress(TimeoutExpired):
            self._process.wait(START_SECONDS)  # it reaps process 1, after which none is left
        for process in filter(None, (self._shell, self._process)):
            _end(process)
        self._shell = None

    def _required(self, command: str, *, stdin: str = "", output_bytes: int | None = None) -> str:
        result = self.run(command, stdin=stdin, output_bytes=output_bytes)
        if not result.succeeded or result.truncated:
            raise OSError(f"{command[:80]} fails in a container: {result.failure or 'the output is too long'}")
        return result.stdout


def _started(words: Sequence[str], env: Mapping[str, str]) -> Popen[bytes]:
    return _starter.submit(_start, words, dict(env)).result()


def _start(words: Sequence[str], env: Mapping[str, str]) -> Popen[bytes]:
    return Popen(words, stdin=PIPE, stdout=PIPE, stderr=STDOUT, env=env, start_new_session=True, bufsize=0)  # nosec B603


def _end(process: Popen[bytes]) -> None:
    """Kill the group of a process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
