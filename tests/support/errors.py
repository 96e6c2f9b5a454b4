"""Errors of users, each of which is one line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import flat
from hybrid_rlhf.configs.parsing.schema import Layer
from tests.support.remedies import require_accepted


@contextlib.contextmanager
def user_error(rule: str | None) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """A block that ends in an error that a pattern matches; none: in any."""
    with pytest.raises(UserError, match=rule) as raised:
        yield raised
    assert "\n" not in str(raised.value)


def refused(call: Callable[..., object], *given: Any, **named: Any) -> str:
    """The error that a call ends in. If it reads a config, the config has every key that the error names."""
    with user_error(None) as raised:
        call(*given, **named)
    message = str(raised.value)
    kinds = [each for each in given if isinstance(each, type)]
    if kinds:
        layers = [item for each in given if isinstance(each, list) for item in each]
        require_accepted(message, kinds, [word for layer in layers for word in _words(layer)])
    return message


def _words(given: Layer | str) -> list[str]:
    """A layer of settings as the command line has it."""
    if isinstance(given, str):
        return [given]
    return [word for key, value in flat(given.content).items() for word in (f"--{key}", str(value))]
