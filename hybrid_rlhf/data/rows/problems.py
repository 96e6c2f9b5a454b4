"""Problems of rows: training stops at the first, a check or a conversion reports each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hybrid_rlhf.configs.errors import UserError

KEPT = 1000
"""Number of problems whose text is kept; a file in another format has one per row."""


class RowProblems:
    """Counts problems and keeps the text of the first."""

    def __init__(self) -> None:
        self.count = 0
        self.texts: list[str] = []
        """Each begins with the file and line, or the number of the row."""

    def add(self, problem: UserError) -> None:
        """Record a problem."""
        self.count += 1
        if len(self.texts) < KEPT:
            self.texts.append(str(problem))

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Record a UserError of the block instead of raising it."""
        try:
            yield
        except UserError as problem:
            self.add(problem)
