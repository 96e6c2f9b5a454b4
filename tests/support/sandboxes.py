"""Sandboxes of one isolation, with small limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.runtime.sandbox import local
from hybrid_rlhf.runtime.sandbox.local import Isolation, LocalSandbox

PYTHON = "/usr/bin/python3"
"""Readable by every user, unlike an interpreter in a home folder."""
SMALL: dict[str, Any] = {"timeout_seconds": 8.0, "memory_gib": 0.25, "disk_gib": 0.01, "processes": 8}
IN_NAMESPACES = (Isolation.NAMESPACES, Isolation.BUBBLEWRAP, Isolation.USER_NAMESPACE)


def processes_of(mark: str) -> list[psutil.Process]:
    """Processes of this machine that have a word in their command line."""
    return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]


def sandbox_of(isolation: Isolation, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LocalSandbox:
    """A sandbox of one isolation; the test is skipped where it does not work."""
    if not Path(PYTHON).exists():
        pytest.skip(f"needs {PYTHON}")
    monkeypatch.setattr(local, "_candidates", lambda: [isolation])
    try:
        return LocalSandbox(SandboxConfig(**SMALL | {"command": (PYTHON, "-s")} | settings))
    except UserError as error:
        pytest.skip(f"{isolation.name.lower()} does not work here: {error}")
