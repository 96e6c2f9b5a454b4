"""Methods whose values are computed once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


def once_for(key: Callable[..., Hashable]) -> Callable[[_Method], _Method]:
    """Decorator of a method that computes a value once for each key, which `key` makes of the object and arguments."""

    def keeping(method: _Method) -> _Method:
        @functools.wraps(method)
        def kept(owner: Any, *arguments: Any, **options: Any) -> Any:
            values = vars(owner).setdefault("_computed_once", {})
            place = method.__name__, key(owner, *arguments, **options)
            if place not in values:
                values[place] = method(owner, *arguments, **options)
            return values[place]

        return kept  # type: ignore[return-value]

    return keeping


once = once_for(lambda owner, *arguments, **options: (arguments, *options.items()))
"""Decorator of a method that computes a value once for the same arguments."""
