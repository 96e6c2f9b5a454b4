"""Errors of users, each of which is one line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybrid_rlhf.configs.errors import UserError


@contextlib.contextmanager
def user_error(rule: str | None) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """A block that ends in an error that a pattern matches; none: in any."""
    with pytest.raises(UserError, match=rule) as raised:
        yield raised
    assert "\n" not in str(raised.value)


def refused(call: Callable[..., object], *given: Any, **named: Any) -> str:
    """The error that a call ends in."""
    with user_error(None) as raised:
        call(*given, **named)
    return str(raised.value)
