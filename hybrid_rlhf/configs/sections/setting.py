"""What a field of a config says about itself beside its type: whether help hides it, and whether a resumed run may
change it.

Why on the field: adding a key is one edit. Help, saved configs, the check of a resumed run and the documentation read
these marks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Marks:
    """Marks of one field."""

    advanced: bool = False
    """Shown by `--help-all` only."""
    mutable: bool = False
    """May change when a run is resumed; of a section: all its keys."""
    variants: Mapping[str, type] | None = None
    """Of a section with several types: the type for each value of its key `name`."""
    needs: str | None = None
    """Of a section that exists only if the config's algorithm has this class attribute true."""
    keys: tuple[str, ...] | None = None
    """Of a section: the keys that this place reads; none: all."""


def setting(
    default: Any = MISSING,
    *,
    default_factory: Callable[[], Any] | None = None,
    advanced: bool = False,
    mutable: bool = False,
    variants: Mapping[str, type] | None = None,
    needs: str | None = None,
    keys: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with marks; see `Marks` for the arguments."""
    metadata = {"marks": Marks(advanced, mutable, variants, needs, keys)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def marks_of(declared: Field[Any]) -> Marks:
    """The marks of a field; those of a plain field are the defaults."""
    marks: Marks = declared.metadata.get("marks", Marks())
    return marks
