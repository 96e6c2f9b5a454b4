"""Rows of a data set with columns that are made when a row is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from datasets import Dataset


class Rows(Protocol):
    """What a loader needs of a data set."""

    @property
    def column_names(self) -> list[str]:
        """What `[name]` knows."""

    def __len__(self) -> int:
        """Rows."""

    def __getitem__(self, key: Any) -> Any:
        """A row by its place, or a column by its name."""


class AugmentedRows:
    """A data set, and columns that a function makes of a row and its place."""

    def __init__(
        self,
        rows: Rows,
        add: Callable[[int, Mapping[str, Any]], Mapping[str, Any]],
        *,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Take the data set, what to add to a row, and whole columns that stand in for stored ones."""
        self._rows, self._add, self._columns = rows, add, columns or {}
        self._names = list(rows.column_names)

    @property
    def column_names(self) -> list[str]:
        """The stored columns."""
        return self._names

    def __len__(self) -> int:
        """Rows."""
        return len(self._rows)

    def __getitem__(self, key: Any) -> Any:
        """A row by its place, with what is added, or a stored column by its name."""
        if isinstance(key, str):
            return self._columns[key] if key in self._columns else self._rows[key]
        row = self._rows[key]
        return {**row, **self._add(key, row)}


def with_mismatched_answers(rows: Dataset, *, max_length: int) -> AugmentedRows:
    """Each row's `responses` and `masks` with one more: its prompt, answered by the next row's first answer.

    Of a prompt that is too long with it the beginning goes.
    """

    def add(place: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
        following = rows[(place + 1) % len(rows)]
        begin, end = row["masks"][0].index(True), following["masks"][0].index(True)
        answer, mask = following["responses"][0][end:], following["masks"][0][end:]
        answer, mask = answer[: max_length - 1], mask[: max_length - 1]
        prompt = row["responses"][0][:begin][max(0, begin + len(answer) - max_length) :]
        return {
            "responses": [*row["responses"], prompt + answer],
            "masks": [*row["masks"], [False] * len(prompt) + mask],
        }

    # As many tokens as the mismatched answer may have, for the size of micro-batches.
    lengths = list(rows["length"])
    more = [min(max_length, mine + other) for mine, other in zip(lengths, lengths[1:] + lengths[:1], strict=True)]
    tokens = [own + extra for own, extra in zip(rows["tokens"], more, strict=True)]
    return AugmentedRows(rows, add, columns={"tokens": tokens})
