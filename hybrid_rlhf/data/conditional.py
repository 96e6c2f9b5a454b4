"""Conditional SFT: each row is told which bucket its score is in, so that at use one asks for the highest.

Buckets are of equal size among the training rows; a score that many rows share is never torn apart. What is told is
text in the model's own tokens, at the beginning of the first user turn or before plain text, and carries no loss.

Sources: Quark (Lu et al. 2022, arXiv 2205.13636), section 2.1; SteerLM (arXiv 2310.05344) for attributes as text.
Deviations: no new embeddings, no KL term, and no rounds of sampling in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sft import SFTDataConfig
from hybrid_rlhf.data.rows import Conversation, is_number
from hybrid_rlhf.data.sources import Row, missing, open_source
from hybrid_rlhf.runtime.progress import ProgressLog
from hybrid_rlhf.runtime.world import World, mistakes_shared

CONDITION_FILE = "condition.json"


@dataclass(frozen=True)
class Condition:
    """Where scores are cut, and what a row of a bucket is told."""

    edges: list[float]
    """Ascending; a score at an edge is in the bucket above it."""
    template: str

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self.edges) + 1

    def bucket(self, score: float) -> int:
        """1 is the lowest."""
        return bisect_right(self.edges, score) + 1

    def text(self, bucket: int) -> str:
        """What a row of a bucket begins with."""
        return self.template.replace("{bucket}", str(bucket)).replace("{buckets}", str(self.buckets))

    def applied(self, place: str, row: Row, record: Conversation) -> Conversation:
        """A record that is told the bucket of its row.

        Raises:
            UserError: for a row without a score or without a place to write it.
        """
        told = self.text(self.bucket(score_of(place, row)))
        if record.text is not None:
            return replace(record, context=told)
        first = next((turn for turn, message in enumerate(record.messages) if message["role"] == "user"), None)
        if first is None:
            raise UserError(f"{place}: a score is told in the first user turn, this conversation has none: add one")
        messages = [dict(message) for message in record.messages]
        messages[first]["content"] = told + messages[first]["content"]
        return replace(record, messages=messages)

    def settings(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {**asdict(self), "texts": [self.text(bucket) for bucket in range(1, self.buckets + 1)]}


def score_of(place: str, row: Row) -> float:
    """The score of a row."""
    if "score" not in row:
        raise missing(place, row, ["score (data.condition_buckets)"])
    if not is_number(row["score"]):
        raise UserError(f"{place}: column 'score' is a number, got {row['score']!r}: mend the row")
    return float(row["score"])


def cut(scores: Sequence[float], *, buckets: int) -> list[float]:
    """Edges that cut scores into buckets of equal size, as nearly as scores that are equal allow.

    Raises:
        UserError: when a bucket stays empty.
    """
    values, counts = np.unique(np.asarray(scores, dtype=np.float64), return_counts=True)
    middle = (np.cumsum(counts) - counts / 2) / max(len(scores), 1)  # the rank of a score among all, in (0, 1)
    bucket = np.floor(middle * buckets).astype(int)
    filled = len(np.unique(bucket))
    if filled < buckets:
        raise UserError(
            f"data.condition_buckets {buckets} needs scores for each bucket, the {len(values):,} different ones of "
            f"{len(scores):,} training rows fill {filled}: lower it"
        )
    return [float(values[bucket == number][0]) for number in range(1, buckets)]


def find_condition(config: SFTDataConfig, training: Callable[[int], Sequence[int]], world: World) -> Condition:
    """Where the scores of the training rows are cut; every rank calls and gets the same.

    Args:
        config: with sources and buckets.
        training: number of rows of a source to the places of those to train on.
        world: its first rank reads.

    Raises:
        UserError: on every rank, for rows without scores, or too few different ones.
    """
    edges: list[float] = []
    with mistakes_shared(world):
        if world.is_main:
            scores: list[float] = []
            for source in config.sources:
                rows = open_source(source)
                progress = ProgressLog(f"scores of {rows.source.path}", total=rows.count())
                found = [score_of(place, row) for place, row in progress.over(rows)]
                scores += [found[place] for place in training(len(found))]
            edges = cut(scores, buckets=config.condition_buckets)
    return Condition(world.broadcast_object(edges), config.condition_template)
