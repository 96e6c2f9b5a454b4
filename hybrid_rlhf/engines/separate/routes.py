"""Which rank sends which part of a weight to which: intersections of what ranks hold with what others need.

A part that several ranks hold comes from one of them, by preference on the receiver's host, such that all send about as
much. All ranks compute the same plan from the same layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybrid_rlhf.engines.separate.intervals import Runs
from hybrid_rlhf.engines.separate.layout import Interval, SentTensor, SentWeight


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that travels from one rank to another."""

    tensor: str
    source: int
    target: int
    runs: tuple[Runs, ...]
    """In the whole tensor, flattened."""

    @property
    def elements(self) -> int:
        """How many it has."""
        return sum(runs.elements for runs in self.runs)


@dataclass(frozen=True)
class Bucket:
    """Weights that travel together."""

    weights: tuple[SentWeight, ...]
    pieces: tuple[Piece, ...]


class RoutePlan:
    """Plans transfers between two groups of ranks."""

    def __init__(
        self,
        held: Mapping[int, Mapping[str, Interval]],
        needed: Mapping[int, Mapping[str, tuple[Runs, ...]]],
        hosts: Sequence[str],
    ) -> None:
        """Take both layouts.

        Args:
            held: for each rank that sends, the intervals of the tensors that are partitioned; it holds all of others.
            needed: for each rank that receives, the parts of each tensor.
            hosts: of all ranks.
        """
        self._held, self._needed = held, needed
        self._near = {
            target: [source for source in held if hosts[source] == hosts[target]] or list(held) for target in needed
        }

    def buckets(
        self, weights: Sequence[SentWeight], *, sends: Callable[[SentTensor], bool], bucket_elements: int
    ) -> list[Bucket]:
        """Divide all weights into buckets.

        Args:
            weights: of the model, in order.
            sends: which tensors travel.
            bucket_elements: most elements of a bucket, unless one weight alone is larger.
        """
        load = dict.fromkeys(self._held, 0)
        buckets: list[Bucket] = []
        bucket: list[SentWeight] = []
        elements = 0
        for weight in weights:
            size = sum(tensor.elements for tensor in weight.tensors if sends(tensor))
            if bucket and elements + size > bucket_elements:
                buckets.append(self._bucket(bucket, sends, load))
                bucket, elements = [], 0
            bucket.append(weight)
            elements += size
        return [*buckets, self._bucket(bucket, sends, load)]

    def _bucket(
        self, weights: Sequence[SentWeight], sends: Callable[[SentTensor], bool], load: dict[int, int]
    ) -> Bucket:
        sent = [tensor for weight in weights for tensor in weight.tensors if sends(tensor)]
        return Bucket(tuple(weights), tuple(piece for tensor in sent for piece in self._pieces(tensor.name, load)))

    def _pieces(self, name: str, load: dict[int, int]) -> Iterator[Piece]:
        """The pieces of a tensor; `load`: elements that each rank sends so far."""
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
