"""Cases of a parametrized test that `make test` leaves out, and tests that need another environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def faults(*case: Any) -> Any:
    """A case of `make faults`."""
    return pytest.param(*case, marks=pytest.mark.faults)


def slow(*case: Any) -> Any:
    """A case of `make slow`."""
    return pytest.param(*case, marks=pytest.mark.slow)


def other_environment(name: str, packages: str) -> tuple[Path, list[pytest.MarkDecorator]]:
    """The folder of an environment that tests/NAME/install.sh builds, and the marks of tests that run in it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get(f"HYBRID_RLHF_{name.upper()}_ENV") or Path(cache) / "hybrid_rlhf" / name)
    reason = f"{packages} not in {folder}: run tests/{name}/install.sh"
    return folder, [pytest.mark.slow, pytest.mark.skipif(not (folder / ".complete").exists(), reason=reason)]
