"""Cases of a parametrized test that `make test` leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def faults(*case: Any) -> Any:
    """A case of `make faults`."""
    return pytest.param(*case, marks=pytest.mark.faults)


def slow(*case: Any) -> Any:
    """A case of `make slow`."""
    return pytest.param(*case, marks=pytest.mark.slow)
