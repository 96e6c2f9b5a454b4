"""Programs in containers, one for each program, with the limits of the local sandbox."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.runtime.sandbox.container import START_SECONDS, STAY, Container, start_container
from hybrid_rlhf.runtime.sandbox.local import GIB, HOME, OPEN_FILES, PROGRAM, write_files
from hybrid_rlhf.runtime.sandbox.process import SandboxResult, run_process

_KILLED = 137
"""Exit status of a container whose program the kernel kills for its memory."""
_TIMED_OUT = 124
"""Exit status of timeout(1)."""
_NOBODY = 65534


class DockerSandbox:
    """Runs programs by the client of Docker or podman; the folder of temporary files must be on the daemon's host."""

    def __init__(self, config: SandboxConfig) -> None:
        """Check that a container starts.

        Raises:
            UserError: if it does not.
        """
        self._config = config
        if shutil.which(config.client) is None:
            raise UserError(f"sandbox.client must be installed, {config.client} is not: install it, or name another")
        result = self.run("")
        if not result.succeeded:
            raise UserError(
                f"an empty program must run in sandbox.image {config.image}, it fails ({result.failure}): check that "
                f"{config.client} run works, and that the image has sandbox.command"
            )

    def run(
        self,
        program: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> SandboxResult:
        """Run the text of a program with a standard input, and with further files in its folder."""
        limit = timeout_seconds or self._config.timeout_seconds
        config = self._config
        name = _new_name()
        with tempfile.TemporaryDirectory(prefix="hybrid_rlhf_sandbox_") as folder:
            write_files(Path(folder), {**(files or {}), PROGRAM: program})
            result = run_process(
                self._command_line(name, folder, limit),
                stdin.encode(errors="replace"),
                env=os.environ,  # of the client, which finds its daemon by it; a container inherits nothing
                timeout_seconds=limit + START_SECONDS,
                output_bytes=config.output_bytes,
                after=lambda: self._remove(name),
            )
        return replace(
            result,
            timed_out=result.timed_out or result.exit_status == _TIMED_OUT,
            memory_exceeded=result.memory_exceeded or (result.exit_status == _KILLED and not result.timed_out),
        )

    def open(self) -> Container:
        """A container with an empty home, whose commands the client's `exec` runs.

        Raises:
            ContainerEnded: if it does not start.
        """
        name = _new_name()
        words = [*self._container(name, self._config.timeout_seconds), str(self._config.image), *STAY]
        process = start_container(words, os.environ)
        enter, remove = (self._config.client, "exec", "--interactive", name), partial(self._remove, name)
        return Container(self._config, process, enter, env=os.environ, remove=remove)

    def _command_line(self, name: str, folder: str, timeout_seconds: float) -> list[str]:
        """The words that run the program of a folder in a container."""
        return [
            *(*self._container(name, timeout_seconds), "--init", "--volume", f"{folder}:/files:ro"),
            *(str(self._config.image), "sh", "-c", 'cp -R /files/. . && "$@"', "sh"),
            *("timeout", "-k", "1", f"{timeout_seconds:g}", *(self._config.command or ("python3",)), PROGRAM),
        ]

    def _container(self, name: str, timeout_seconds: float) -> list[str]:
        """The words of a container with the limits of a program."""
        config = self._config
        disk = round(config.disk_gib * GIB)
        memory = str(round(config.memory_gib * GIB))
        return [
            *(config.client, "run", "--rm", "--interactive", "--name", name),
            *("--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--user", f"{_NOBODY}:{_NOBODY}", "--workdir", HOME, "--env", f"HOME={HOME}"),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(config.processes)),
            *("--ulimit", f"cpu={math.ceil(timeout_seconds)}", "--ulimit", "core=0"),
            *("--ulimit", f"nofile={OPEN_FILES}", "--ulimit", f"fsize={disk}"),
            *("--tmpfs", f"{HOME}:rw,exec,nosuid,nodev,size={disk},mode=1777"),
        ]

    def _remove(self, name: str) -> None:
        """End the container, which outlives its client where that is killed."""
        command = [self._config.client, "rm", "--force", name]
        run_process(command, b"", env=os.environ, timeout_seconds=START_SECONDS, output_bytes=0)


def _new_name() -> str:
    return f"hybrid_rlhf_{secrets.token_hex(8)}"
