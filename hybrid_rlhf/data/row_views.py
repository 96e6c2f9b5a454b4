"""Views of a data set: some of its rows, or its rows with additional columns, without copying it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import datasets
import numpy as np


class RowSequence(Protocol):
    """The part of a data set that a loader uses."""

    @property
    def column_names(self) -> list[str]:
        """The columns that indexing by name returns."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, key: Any) -> Any:
        """A row by index, or a column by name."""


def column_array(rows: RowSequence, name: str) -> np.ndarray:
    """A column of numbers; a column of a data set is read as Arrow, without a Python object per row."""
    if isinstance(rows, datasets.Dataset):
        return np.asarray(rows.select_columns([name]).with_format("arrow")[:][name])
    return np.asarray(rows[name])


class RowSubset:
    """Some rows of a data set, in the order of their indices."""

    def __init__(self, rows: RowSequence, indices: Sequence[int]) -> None:
        self._rows = rows
        self._indices = indices

    @property
    def column_names(self) -> list[str]:
        """The columns of the data set."""
        return self._rows.column_names

    def __len__(self) -> int:
        """Number of rows in the subset."""
        return len(self._indices)

    def __getitem__(self, key: Any) -> Any:
        """A row by its index in the subset, or a column by name."""
        if isinstance(key, str):
            column = list(self._rows[key])
            return [column[index] for index in self._indices]
        return self._rows[self._indices[key]]


class AugmentedRows:
    """A data set with columns that a function computes from a row and its index."""

    def __init__(
        self,
        rows: RowSequence,
        add: Callable[[int, Mapping[str, Any]], Mapping[str, Any]],
        *,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Take the data set, the function, and complete columns that replace stored ones."""
        self._rows = rows
        self._add = add
        self._columns = columns or {}
        self._names = list(rows.column_names)

    @property
    def column_names(self) -> list[str]:
        """The stored columns."""
        return self._names

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, key: Any) -> Any:
        """A row by index, with the computed columns, or a stored column by name."""
        if isinstance(key, str):
            return self._columns[key] if key in self._columns else self._rows[key]
        row = self._rows[key]
        return {**row, **self._add(key, row)}
