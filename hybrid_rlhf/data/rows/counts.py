"""What became of the rows of a step's sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import datasets
import numpy as np


@dataclass(frozen=True)
class RowCounts:
    """Counts over all sources, before they are divided between steps; the rows of `training` and `held_out` are those
    of this step."""

    kind: str
    """What the rows are read as: sft, preference, prompt, ..."""
    sources: tuple[str, ...]
    read: int
    """Rows of the sources."""
    encoded: int
    """Rows made of them; a conversation may make several."""
    truncated: int
    """Rows cut at the limit."""
    dropped_too_long: int
    """Rows dropped at the limit (data.too_long drop)."""
    dropped_without_target: int
    """Rows dropped because nothing is left to learn from, after truncation or from the start."""
    limit_tokens: int
    training: int
    """After weighting the sources."""
    held_out: int

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
    ) -> RowCounts:
        """Count the encoded rows of sources, with their columns `cut`, `usable` and `source_row`."""
        cut = [np.asarray(part["cut"], dtype=bool) for part in parts]
        usable = [np.asarray(part["usable"], dtype=bool) for part in parts]
        cut_and_dropped = sum(int((c & ~u).sum()) for c, u in zip(cut, usable, strict=True))
        dropped, too_long = sum(int((~u).sum()) for u in usable), cut_and_dropped if drops_long else 0
        return cls(
            kind,
            tuple(sources),
            read=sum(len(np.unique(part["source_row"])) for part in parts),
            encoded=sum(map(len, parts)),
            truncated=0 if drops_long else sum(int(c.sum()) for c in cut),
            dropped_too_long=too_long,
            dropped_without_target=dropped - too_long,
            limit_tokens=limit,
            training=training,
            held_out=held_out,
        )

    @property
    def dropped(self) -> int:
        """Rows dropped for any reason."""
        return self.dropped_too_long + self.dropped_without_target
