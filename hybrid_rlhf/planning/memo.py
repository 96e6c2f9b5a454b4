"""Values that are computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Memo:
    """Remembers what was computed for a key."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """The value of a key, computed where it is not known."""
        if key not in self._known:
            self._known[key] = compute()
        value: _T = self._known[key]
        return value
