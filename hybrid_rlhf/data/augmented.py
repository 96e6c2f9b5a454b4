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
    """Each row's `responses` and `masks` with as many more: its prompt, answered by the answers of the next row.

    A pair takes the chosen and the rejected answer of the next pair, so that both kinds count alike, as in TRL's
    unpaired data (kto_trainer.py). A row that takes one answer of a pair takes either kind, by its place. The answers
    belong to the row and not to the update that it is drawn into, so that the reference reads them once.

    The beginning of a prompt that is too long with an answer is cut off.
    """

    def add(place: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
        following = rows[(place + 1) % len(rows)]
        begin, count = row["masks"][0].index(True), len(following["responses"])
        responses, masks = list(row["responses"]), list(row["masks"])
        for number in range(len(row["responses"])):
            other = (place + number) % count
            end = following["masks"][other].index(True)
            answer, mask = following["responses"][other][end:], following["masks"][other][end:]
            answer, mask = answer[: max_length - 1], mask[: max_length - 1]
            prompt = row["responses"][0][:begin][max(0, begin + len(answer) - max_length) :]
            responses.append(prompt + answer)
            masks.append([False] * len(prompt) + mask)
        return {"responses": responses, "masks": masks}

    # As many tokens as the mismatched answers may have, for the size of micro-batches.
    lengths, answers = list(rows["length"]), [len(labels) for labels in rows["labels"]]
    more = [
        count * min(max_length, mine + other)
        for count, mine, other in zip(answers, lengths, lengths[1:] + lengths[:1], strict=True)
    ]
    tokens = [own + extra for own, extra in zip(rows["tokens"], more, strict=True)]
    return AugmentedRows(rows, add, columns={"tokens": tokens})
