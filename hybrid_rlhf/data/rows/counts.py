"""Counts of the rows of a step's sources: read, encoded, truncated, dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import datasets
import numpy as np

from hybrid_rlhf.data.row_views import column_array

_TOLERATED = 10
"""One in this number of rows may be too long without a warning."""


def histogram(lengths: Sequence[int], *, bins: int = 10) -> list[tuple[int, int, int]]:
    """(shortest, longest, rows) of equal ranges of lengths, from 1 token to the longest row."""
    width = -(-max(lengths, default=0) // bins) or 1
    counts = Counter(max(length - 1, 0) // width for length in lengths)
    return [(number * width + 1, (number + 1) * width, counts[number]) for number in range(max(counts, default=-1) + 1)]


@dataclass(frozen=True)
class RowCounts:
    """Counts over all sources, before they are divided between steps; only `training` and `held_out` count the rows of
    this step."""

    kind: str
    """Row format of the step: sft, preference, prompt, ..."""
    sources: tuple[str, ...]
    read: int
    """Number of rows of the sources."""
    encoded: int
    """Number of rows encoded from them; a conversation may make several."""
    truncated: int
    """Number of rows cut at the limit."""
    dropped_too_long: int
    """Number of rows dropped at the limit (data.too_long drop)."""
    dropped_without_target: int
    """Number of rows dropped because nothing is left to learn from, after truncation or from the start."""
    ties: int
    """Number of those that are ties: rows of preferences without tokens."""
    limit_tokens: int
    longest_tokens: int
    """The limit that would keep all rows."""
    nine_tenths_tokens: int
    """The limit that would keep nine rows in ten."""
    training: int
    """Number of rows after weighting the sources."""
    held_out: int
    with_images: int = 0
    """Number of encoded rows that have images."""
    image_tokens: tuple[tuple[int, int, int], ...] = ()
    """The histogram of the number of tokens of their images."""

    @classmethod
    def of(
        cls,
        kind: str,
        parts: Sequence[datasets.Dataset],
        *,
        sources: Sequence[str],
        limit: int,
        drops_long: bool,
        training: int,
        held_out: int,
        image_tokens: Sequence[int] = (),
    ) -> RowCounts:
        """Count the encoded rows of sources, with their columns `cut`, `usable`, `full_length` and `source_row`;
        `image_tokens`: of the images of each row that has any."""
        cut, usable, lengths = (
            np.concatenate([column_array(part, name) for part in parts]) for name in ("cut", "usable", "full_length")
        )
        dropped = int((~usable).sum())
        too_long = int((cut & ~usable).sum()) if drops_long else 0
        return cls(
            kind,
            tuple(sources),
            read=sum(len(np.unique(column_array(part, "source_row"))) for part in parts),
            encoded=len(cut),
            truncated=0 if drops_long else int(cut.sum()),
            dropped_too_long=too_long,
            dropped_without_target=dropped - too_long,
            ties=0 if kind == "sft" else int((lengths == 0).sum()),
            limit_tokens=limit,
            longest_tokens=int(lengths.max()),
            nine_tenths_tokens=int(np.quantile(lengths, 0.9, method="higher")),
            training=training,
            held_out=held_out,
            with_images=len(image_tokens),
            image_tokens=tuple(histogram(image_tokens)),
        )

    @property
    def dropped(self) -> int:
        """Number of rows dropped for any reason."""
        return self.dropped_too_long + self.dropped_without_target

    @property
    def ties_text(self) -> str:
        """The number of ties, after that of the rows dropped; empty without ties."""
        return f", {self.ties:,} of them ties" if self.ties else ""

    def too_long_text(self, limit_key: str) -> str:
        """A warning of how many rows exceed the limit, with the limits that would keep them; empty if at most a tenth
        do."""
        count = self.truncated + self.dropped_too_long
        if count <= self.encoded / _TOLERATED:
            return ""
        most = f", {self.nine_tenths_tokens:,} nine rows in ten" * (self.nine_tenths_tokens < self.longest_tokens)
        return (
            f"{count:,} of {self.encoded:,} rows are longer than {limit_key} {self.limit_tokens:,} and were "
            f"{'truncated' if self.truncated else 'dropped'}; {limit_key} {self.longest_tokens:,} keeps all{most}"
        )
