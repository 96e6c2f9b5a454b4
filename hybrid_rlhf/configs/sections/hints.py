"""Types of fields: the alternatives of a union, and how help and errors show a type."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal


@functools.cache
def type_hints(kind: type | Callable[..., Any]) -> dict[str, Any]:
    """The types of a dataclass's fields, or of a function's arguments."""
    return typing.get_type_hints(kind)


def options_of(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; any other type alone."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def parts_of(hint: Any) -> Iterator[Any]:
    """A type, the types that it consists of, and their annotations."""
    yield hint
    if typing.get_origin(hint) is not Literal:
        for part in typing.get_args(hint):
            yield from parts_of(part)


def section_type(hint: Any) -> Any:
    """The dataclass of a section's type, which may be optional; None for the type of a key."""
    return next(filter(dataclasses.is_dataclass, options_of(hint)), None)


def is_list(hint: Any) -> bool:
    """Return True if a key's value is a list of any length."""
    options = options_of(hint)
    lists = (typing.get_origin(option) is list or typing.get_args(option)[1:] == (...,) for option in options)
    return str not in options and any(lists)


def type_name(hint: Any) -> str:
    """A type as shown in help and errors."""
    parts = typing.get_args(hint)
    if hint in (type(None), ...):
        return "..." if hint is ... else "null"
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(str(part) for part in parts if part != '')}"
    options = options_of(hint)
    if len(options) > 1:
        shown = [option for option in options if option is not int or float not in options]
        return " or ".join(map(type_name, shown))
    return f"{hint.__name__}[{', '.join(map(type_name, parts))}]" if parts else str(hint.__name__)
