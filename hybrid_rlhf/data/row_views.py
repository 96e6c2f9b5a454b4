"""Views of a data set: some of its rows, or its rows with additional columns, without copying it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import datasets
import numpy as np


class RowView:
    """Rows that are made from those of a data set when they are read."""

    def __init__(
        self, names: Sequence[str], size: int, *, row: Callable[[int], Any], column: Callable[[str], Sequence[Any]]
    ) -> None:
        """Take the names of the columns, the number of rows, and functions that return a row and a column."""
        self.column_names = names
        self._size = size
        self._row = row
        self._column = column

    def __len__(self) -> int:
        """Number of rows."""
        return self._size

    def __getitem__(self, key: Any) -> Any:
        """A row by index, or a column by name."""
        return self._column(key) if isinstance(key, str) else self._row(key)


RowSequence: TypeAlias = datasets.Dataset | RowView


def column_array(rows: RowSequence, name: str) -> np.ndarray:
    """A column of numbers; a column of a data set is read as Arrow, without a Python object per row."""
    if isinstance(rows, datasets.Dataset):
        return np.asarray(rows.select_columns([name]).with_format("arrow")[:][name])
    return np.asarray(rows[name])


def row_subset(rows: RowSequence, indices: Sequence[int]) -> RowView:
    """Some rows of a data set, in the order of their indices."""

    def column(name: str) -> list[Any]:
        values = list(rows[name])
        return [values[index] for index in indices]

    return RowView(rows.column_names, len(indices), row=lambda place: rows[indices[place]], column=column)


def augmented_rows(
    rows: RowSequence,
    add: Callable[[int, Mapping[str, Any]], Mapping[str, Any]],
    columns: Mapping[str, Sequence[Any]],
) -> RowView:
    """A data set with columns that a function computes from a row and its index, and complete columns that replace
    stored ones."""

    def row(place: int) -> dict[str, Any]:
        stored = rows[place]
        return {**stored, **add(place, stored)}

    def column(name: str) -> Sequence[Any]:
        return columns[name] if name in columns else rows[name]

    return RowView(rows.column_names, len(rows), row=row, column=column)
