"""Starts commands of this package: with this interpreter, settings in a file, and a separate process group."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess  # starts the commands of this package  # nosec B404
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import nested
from hybrid_rlhf.runtime.command_line import child_environment

_KILL_SECONDS = 5.0


def command_line(name: str, settings: Path, *words: str) -> list[str]:
    """The command line of a command of this package with its settings."""
    return [sys.executable, "-m", "hybrid_rlhf", name, "--config", str(settings), *words]


def start_process(
    command: Sequence[str], variables: Mapping[str, str] | None = None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a command in a new session, so that Ctrl-C of the board does not reach it.

    `variables` are added to its environment.
    """
    environment = {**child_environment(os.environ), **(variables or {})}
    return subprocess.Popen(  # a list of arguments, no shell  # nosec B603
        command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True, **streams
    )


@contextlib.contextmanager
def json_command(name: str, settings: Mapping[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Context with a command of this package that prints its result as JSON; its settings are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="hybrid_rlhf_board_") as folder:
        file = Path(folder) / "settings.yaml"
        file.write_text(yaml.safe_dump(dict(settings), allow_unicode=True), encoding="utf-8")
        yield start_process(command_line(name, file, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def read_result(output: bytes, otherwise: str) -> dict[str, Any]:
    """The result of a command, the last line of its output.

    Raises:
        UserError: with the error of the command, or `otherwise` if it has printed no JSON.
    """
    try:
        result = json.loads(output.strip().split(b"\n")[-1])
    except ValueError:
        raise UserError(otherwise) from None
    if not isinstance(result, dict) or "error" in result:
        raise UserError(str(result.get("error") if isinstance(result, dict) else result))
    return result


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a command and the processes that it has started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def nested_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a form, by dotted key, as sections.

    Raises:
        UserError: if a key is both a value and a section.
    """
    try:
        return nested(values)
    except (AttributeError, TypeError):
        raise UserError("a key must be a value or a section, got one that is both: leave one out") from None
