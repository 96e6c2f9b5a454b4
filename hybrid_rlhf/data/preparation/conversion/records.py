"""Results of a conversion: a row in the form of rows/formats.py, or ranked completions, written in one of three
forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rlhf.configs.commands.data import RankedAs
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.images.expansion import TEXT_ONLY
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import require_text
from hybrid_rlhf.data.rows.problems import RowProblems

LocatedRow = tuple[str, Row]


class TrackedRow(Row):
    """A row that knows which of its columns are read by name."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self._read = set[str]()

    def __getitem__(self, name: str) -> Any:
        """The value of a column, which is read now."""
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a column, which is read now, or the default."""
        self._read.add(name)
        return super().get(name, default)

    def unread(self) -> list[str]:
        """The columns with a value that are not read so far."""
        return [name for name, value in self.items() if name not in self._read and value not in ("", [], {})]


@dataclass(frozen=True)
class RankedCompletions:
    """Completions of a prompt in an order of preference."""

    prompt: list[Message]
    completions: list[Message]
    """One turn per completion."""
    ranks: list[float]
    """Rank of each completion; lower is better."""

    def written(self, location: str, ranked_as: RankedAs) -> Row:
        """The row in one of the three forms.

        Raises:
            UserError: for a pair of equal ranks.
        """
        if ranked_as == "ranks":
            return {"prompt": self.prompt, "responses": [[turn] for turn in self.completions], "ranks": self.ranks}
        best = self.completions[self.ranks.index(min(self.ranks))]
        if ranked_as == "messages":
            return {"messages": [*self.prompt, best]}
        if min(self.ranks) == max(self.ranks):
            raise UserError(f"{location}: a pair needs two different ranks, got {self.ranks}: remove the row")
        worst = self.completions[self.ranks.index(max(self.ranks))]
        return pair_row(self.prompt, [best], [worst])


Record = Row | RankedCompletions
Conversion = Callable[[Iterable[LocatedRow], RankedAs, RowProblems], Iterator[tuple[str, Record]]]
"""From the rows of a source to records with their location; rows that cannot be converted are recorded as problems."""


def row_by_row(convert: Callable[[str, Row], Record], *, keeps_images: bool = False) -> Conversion:
    """The conversion of a format in which rows are independent of each other; `keeps_images`: with their images."""

    def conversion(rows: Iterable[LocatedRow], _: RankedAs, problems: RowProblems) -> Iterator[tuple[str, Record]]:
        for location, row in rows:
            with problems.collected():
                require_text(location, row, "" if keeps_images else TEXT_ONLY)
                yield location, convert(location, row)

    return conversion


def pair_row(prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]) -> Row:
    """A row of a preference pair."""
    return {"prompt": list(prompt), "chosen": list(chosen), "rejected": list(rejected)}
