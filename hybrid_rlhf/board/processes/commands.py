"""How the board starts a command of this package: this interpreter, settings in a file, a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess  # starts the commands of this package  # nosec B404
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import nested

_ROOT = Path(__file__).parents[3]
"""Folder that contains the package."""
_KILL_SECONDS = 5.0


def command_line(name: str, settings: Path, *words: str) -> list[str]:
    """A command of this package with its settings."""
    return [sys.executable, "-m", "hybrid_rlhf", name, "--config", str(settings), *words]


def start_process(
    command: Sequence[str], variables: Mapping[str, str] | None = None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a command; its signals are its own, so Ctrl-C of the board does not reach it.

    `variables` are added to its environment.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})}
    if _ROOT.name not in ("site-packages", "dist-packages"):  # a checkout, which need not be installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), environment.get("PYTHONPATH"))))
    return subprocess.Popen(  # a list of arguments, no shell  # nosec B603
        command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True, **streams
    )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write_settings(file: Path, values: Mapping[str, Any]) -> None:
    """Write nested settings as a config file."""
    file.write_text(yaml.safe_dump(dict(values), allow_unicode=True), encoding="utf-8")


def nested_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a form, by dotted key, as sections.

    Raises:
        UserError: if a key is a value and a section too.
    """
    try:
        return nested(values)
    except (AttributeError, TypeError):
        raise UserError("a key must be a value or a section, got one that is both: leave one out") from None
