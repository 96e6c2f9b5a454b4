"""Sender and receiver of each part of a weight: intersections of the parts that ranks have and the parts needed.

A part that several ranks have is sent by one of them, preferably on the receiver's host, so that all send about the
same amount. All ranks compute the same plan from the same layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybrid_rlhf.engines.separate.intervals import Runs
from hybrid_rlhf.engines.separate.layout import Interval, SentWeight


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that one rank sends to another."""

    tensor: str
    source: int
    target: int
    runs: tuple[Runs, ...]
    """Elements in the full tensor, flattened."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(runs.elements for runs in self.runs)


@dataclass(frozen=True)
class Bucket:
    """Weights that are sent together."""

    weights: tuple[SentWeight, ...]
    pieces: tuple[Piece, ...]


class RoutePlan:
    """Plans transfers between two groups of ranks."""

    def __init__(
        self,
        intervals: Mapping[int, Mapping[str, Interval]],
        needed: Mapping[int, Mapping[str, tuple[Runs, ...]]],
        hosts: Sequence[str],
    ) -> None:
        """Set the layouts.

        Args:
            intervals: for each sending rank, its intervals of partitioned tensors; it has all other tensors whole.
            needed: for each receiving rank, the parts of each tensor that it needs.
            hosts: host names of all ranks.
        """
        self._held = intervals
        self._needed = needed
        self._near = {
            target: [source for source in intervals if hosts[source] == hosts[target]] or list(intervals)
            for target in needed
        }

    def buckets(self, weights: Sequence[SentWeight], *, everything: bool, bucket_elements: int) -> list[Bucket]:
        """Divide all weights into buckets.

        Args:
            weights: weights of the model, in order.
            everything: send all tensors; false: only trained ones.
            bucket_elements: maximum number of elements per bucket, unless a single weight is larger.
        """
        load = dict.fromkeys(self._held, 0)
        buckets: list[Bucket] = []
        bucket: list[SentWeight] = []
        elements = 0
        for weight in weights:
            size = sum(tensor.elements for tensor in weight.tensors if everything or tensor.trained)
            if bucket and elements + size > bucket_elements:
                buckets.append(self._bucket(bucket, everything, load))
                bucket = []
                elements = 0
            bucket.append(weight)
            elements += size
        return [*buckets, self._bucket(bucket, everything, load)]

    def _bucket(self, weights: Sequence[SentWeight], everything: bool, load: dict[int, int]) -> Bucket:
        sent = [tensor for weight in weights for tensor in weight.tensors if everything or tensor.trained]
        return Bucket(tuple(weights), tuple(piece for tensor in sent for piece in self._pieces(tensor.name, load)))

    def _pieces(self, name: str, load: dict[int, int]) -> Iterator[Piece]:
        """Yield the pieces of a tensor; `load`: number of elements that each rank sends so far, which is updated."""
        partitions = {source: intervals[name] for source, intervals in self._held.items() if name in intervals}
        for target, needs in self._needed.items():
            if not needs[name]:
                continue
            if not partitions:
                source = min(self._near[target], key=lambda rank: (load[rank], rank))
                piece = Piece(name, source, target, needs[name])
                load[source] += piece.elements
                yield piece
            for source, (start, stop) in partitions.items():
                if runs := tuple(part for runs in needs[name] for part in runs.within(start, stop)):
                    yield Piece(name, source, target, runs)
