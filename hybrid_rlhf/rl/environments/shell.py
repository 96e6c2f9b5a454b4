"""Environment with a shell as a tool: each episode has a container of its own, in which bash stays.

The actor calls `shell` with a command, in the format of its chat template, and observes its output. Folder, variables,
files and background processes stay until the episode ends. A turn without a call ends it, and so do its limits: the
row's column `tests`, a command, then decides in a new shell of the same files, after the end of all other processes.
The reward is 1 if its exit status is 0.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.loop.sandboxes import build_sandbox
from hybrid_rlhf.rl.environments.environment import StepResult
from hybrid_rlhf.rl.environments.tools import UNREADABLE, requested_calls
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.sandbox.container import Container, ContainerEnded
from hybrid_rlhf.runtime.sandbox.process import SandboxResult

_OUTPUT_BYTES = 4000


class Shell:
    """One task in a container."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "shell",
                "description": "Run a command in bash. Its folder, variables and background processes stay.",
                "parameters": {
                    "type": "object",
                    "properties": {"command": {"type": "string"}},
                    "required": ["command"],
                },
            },
        },
    )

    def __init__(
        self,
        *,
        sandbox: Mapping[str, Any] | None = None,
        setup: str | None = None,
        pool: int = 2,
        tests: str | None = None,
    ) -> None:
        """Take settings of the sandbox, with 4000 as `output_bytes`; a command whose files each container has from the
        beginning; how many containers wait for episodes; and the command that rewards rows without a column `tests`."""
        settings = {"output_bytes": _OUTPUT_BYTES, **(sandbox or {})}
        self._pool = _shared_pool(json.dumps(settings, sort_keys=True), setup, pool)
        self._tests = tests
        self._container: Container | None = None

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Start a container with the row's `files`, texts by name."""
        self._tests = row.get("tests") or self._tests
        self._test_files = row.get("test_files") or {}
        self._container = self._pool.take()
        self._container.write(row.get("files") or {})
        return list(row["prompt"])

    def step(self, completion: str) -> StepResult:
        """Run the commands of a turn, or the tests."""
        assert self._container is not None
        calls = requested_calls(completion, list(self.tools))
        try:
            if calls is None:
                return StepResult(None, self._score(self._container), True)
            commands = [str(call.arguments.get("command", "")) for call in calls]
            told = [_observation(self._container.shell(command)) for command in commands]
        except ContainerEnded as error:
            return StepResult(f"[{error}]", 0.0, True)
        return StepResult("\n".join(told) or UNREADABLE, 0.0, False)

    def truncated(self) -> float:
        """Run the tests on what the actor has done until its last turn."""
        assert self._container is not None
        return self._score(self._container)

    def close(self) -> None:
        """Remove the container."""
        if self._container is not None:
            self._container.close()

    def _score(self, container: Container) -> float:
        if self._tests is None:
            return 0.0
        try:
            container.kill()
            container.write(self._test_files)
            return float(container.run(self._tests).succeeded)
        except (ContainerEnded, OSError) as error:  # the actor has filled the disk, or denied a folder
            logger.warning("the tests of an episode cannot run, its reward is 0: %s", error)
            return 0.0


class _Pool:
    """Containers that have started before an episode needs them."""

    def __init__(self, sandbox: SandboxConfig, setup: str | None, size: int) -> None:
        self._sandbox: Any = build_sandbox(sandbox)
        if not hasattr(self._sandbox, "open"):
            raise UserError(f"a shell needs a sandbox with open(), {sandbox.kind} has none: add it, or choose another")
        self._snapshot: str | None = None
        try:
            container = self._open()
            if setup is not None:
                result = container.run(setup)
                if not result.succeeded:
                    raise UserError(f"setup of a shell must succeed, {setup!r} fails ({result.failure}): fix it")
                self._snapshot = container.snapshot()
            container.close()
        except (ContainerEnded, OSError) as error:
            raise UserError(f"a shell needs containers with bash, tar and base64 ({error}): fix the sandbox") from error
        self._starter = ThreadPoolExecutor(max(1, size))
        self._warm: deque[Future[Container]] = deque(self._starter.submit(self._open) for _ in range(size))

    def take(self) -> Container:
        """A container, for which another one starts."""
        self._warm.append(self._starter.submit(self._open))
        return self._warm.popleft().result()

    def _open(self) -> Container:
        container: Container = self._sandbox.open()
        if self._snapshot is not None:
            container.restore(self._snapshot)
        return container


@functools.cache
def _shared_pool(settings: str, setup: str | None, size: int) -> _Pool:
    """The containers of all episodes of a process."""
    return _Pool(SandboxConfig(**json.loads(settings)), setup, size)


def _observation(result: SandboxResult) -> str:
    """What a command wrote, and why it failed."""
    parts = [result.stdout.rstrip()]
    if result.failure is not None:
        parts.append(f"[{result.failure}]")
    return "\n".join(filter(None, parts)) or "[no output]"
