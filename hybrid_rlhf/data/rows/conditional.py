"""Conditional SFT: the prompt of each row names the bucket of its score, so that the best one can be requested later.

Buckets have equal sizes among the training rows; rows with equal scores are always in one bucket. The bucket is named
in plain text, at the beginning of the first user turn or before plain text, and carries no loss.

Sources: Quark (Lu et al. 2022, arXiv 2205.13636), section 2.1; SteerLM (arXiv 2310.05344) for attributes as text.
Deviations: no new embeddings, no KL term, and no sampling between rounds of training.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.data import DataConfig
from hybrid_rlhf.configs.sft import ConditionConfig
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import ConversationRow, number_column
from hybrid_rlhf.data.rows.sources import missing_columns_error, open_source
from hybrid_rlhf.runtime.observability.progress import ProgressLog
from hybrid_rlhf.runtime.world import World, shared_user_errors

CONDITION_FILE = "condition.json"


@dataclass(frozen=True)
class ScoreBuckets:
    """The edges of the score buckets, and the text that names a bucket."""

    edges: list[float]
    """Ascending; a score equal to an edge belongs to the bucket above it."""
    template: str

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return len(self.edges) + 1

    def bucket(self, score: float) -> int:
        """The bucket of a score; 1 is the lowest."""
        return bisect_right(self.edges, score) + 1

    def text(self, bucket: int) -> str:
        """The text at the beginning of a row in a bucket."""
        return self.template.replace("{bucket}", str(bucket)).replace("{buckets}", str(self.buckets))

    def apply(self, location: str, row: Row, record: ConversationRow) -> ConversationRow:
        """Add the bucket of a row's score to its record.

        Raises:
            UserError: for a row without a score or without a user turn.
        """
        text = self.text(self.bucket(read_score(location, row)))
        if record.text is not None:
            return replace(record, context=text)
        first = next((turn for turn, message in enumerate(record.messages) if message["role"] == "user"), None)
        if first is None:
            raise UserError(
                f"{location}: a conversation must have a user turn with condition.buckets, got none: add one"
            )
        messages = [dict(message) for message in record.messages]
        messages[first]["content"] = text + messages[first]["content"]
        return replace(record, messages=messages)

    def to_json(self) -> dict[str, Any]:
        """The buckets as a JSON object."""
        return {**asdict(self), "texts": [self.text(bucket) for bucket in range(1, self.buckets + 1)]}


def read_score(location: str, row: Row) -> float:
    """The score of a row."""
    if "score" not in row:
        raise missing_columns_error(location, row, ["score (condition.buckets)"])
    return number_column(location, row, "score")


def bucket_edges(scores: Sequence[float] | np.ndarray, *, buckets: int) -> list[float]:
    """Edges that divide scores into buckets of equal size, as far as equal scores allow.

    Raises:
        UserError: if a bucket is empty.
    """
    values, counts = np.unique(np.asarray(scores, dtype=np.float64), return_counts=True)
    middle = (np.cumsum(counts) - counts / 2) / max(len(scores), 1)  # the mean quantile of each distinct score
    bucket = np.floor(middle * buckets).astype(int)
    filled = len(np.unique(bucket))
    if filled < buckets:
        raise UserError(
            f"condition.buckets must not exceed the buckets that scores fill, got {buckets}, the {len(values):,} "
            f"different scores of {len(scores):,} training rows fill {filled}: lower it"
        )
    return [float(values[bucket == number][0]) for number in range(1, buckets)]


def find_score_buckets(
    config: ConditionConfig, data: DataConfig, training: Callable[[Sequence[int]], Sequence[np.ndarray]], world: World
) -> ScoreBuckets:
    """Find the buckets of the training rows' scores, the same on every rank. Every rank calls.

    Args:
        config: the number of buckets and the template of their text.
        data: the data section, with sources.
        training: returns the indices of the training rows of each source, given their numbers of rows.
        world: rank 0 reads the sources.

    Raises:
        UserError: on every rank, for rows without scores or too few different scores.
    """
    edges: list[float] = []
    with shared_user_errors(world):
        if world.is_main:
            scores = []
            for source in data.sources:
                rows = open_source(source)
                progress = ProgressLog(f"scores of {rows.source.path}", total=rows.count())
                scores.append(np.asarray([read_score(location, row) for location, row in progress.track(rows)]))
            chosen = training([len(of_source) for of_source in scores])
            of_training = [of_source[rows] for of_source, rows in zip(scores, chosen, strict=True)]
            edges = bucket_edges(np.concatenate(of_training), buckets=config.buckets)
    return ScoreBuckets(world.broadcast_object(edges), config.template)
