"""Weights of a trained model, broadcast in buckets to ranks that do not have the model, and their checksums.

The first training rank describes the model to the receiving ranks, which need neither its code nor its files. All ranks
derive the same buckets from the description. The training ranks gather the weights of a bucket, as for inference
weights of their own, and the first of them merges adapters and broadcasts the bucket.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.deepspeed_internals import full_shape
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.engines.partition import BaseWeight, base_parameters, base_weights, full_weights
from hybrid_rlhf.engines.tower_copy import TowerDescription
from hybrid_rlhf.generation.engine import default_stop_token_ids
from hybrid_rlhf.generation.weights.inference_weights import DescribedModel, DescribeModel
from hybrid_rlhf.runtime.world import World

T = TypeVar("T")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS = 1024


@dataclass(frozen=True)
class SentWeight:
    """Description of a weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    changes: bool
    """True if training changes the weight or its adapter."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Weights of one dtype that are sent together."""

    weights: tuple[SentWeight, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(weight.elements for weight in self.weights) * self.weights[0].dtype.itemsize

    def views(self, message: Tensor) -> list[Tensor]:
        """Return the weights in a message of bytes, each in its shape."""
        parts = message.view(self.weights[0].dtype).split([weight.elements for weight in self.weights])
        return [part.view(weight.shape) for part, weight in zip(parts, self.weights, strict=True)]


@dataclass(frozen=True)
class TrainedModel:
    """Description of the trained model for the ranks that receive its weights."""

    described: DescribedModel
    weights: tuple[SentWeight, ...]
    dtype: torch.dtype
    stop_token_ids: tuple[int, ...]
    """EOS tokens of the model; empty for a model that does not generate."""
    tower: TowerDescription | None = None
    """The tower for images, whose weights are sent too; None: they are not."""

    @classmethod
    def of(cls, lm: PreTrainedModel, describe: DescribeModel = DescribedModel.of, *, sends_tower: bool = False) -> Self:
        """Describe a model, partitioned or not, `sends_tower` with its tower for images.

        Raises:
            NotDescribed: when the family table does not cover the model.
        """
        described = describe(lm, [name for name, _ in base_parameters(lm)])
        weights = []
        for weight in base_weights(lm):
            if sends_tower or weight.name not in described.unread:
                changes = any(parameter.requires_grad for parameter in weight.parameters)
                parameter = weight.parameter
                weights.append(SentWeight(weight.name, full_shape(parameter), parameter.dtype, changes))
        stop_token_ids = default_stop_token_ids(lm) if lm.can_generate() else ()
        tower = TowerDescription.of(lm) if sends_tower else None
        return cls(described, tuple(weights), next(lm.parameters()).dtype, stop_token_ids, tower)

    def buckets(self, *, everything: bool, bucket_elements: int) -> list[Bucket]:
        """Divide the weights into buckets.

        Args:
            everything: all weights; false: only those that change.
            bucket_elements: maximum number of elements per bucket, unless a single weight is larger.
        """
        buckets: list[list[SentWeight]] = []
        free = 0
        for weight in self.weights:
            if not (everything or weight.changes):
                continue
            free -= weight.elements
            if not buckets or free < 0 or buckets[-1][0].dtype != weight.dtype:
                buckets.append([])
                free = bucket_elements - weight.elements
            buckets[-1].append(weight)
        return [Bucket(tuple(weights)) for weights in buckets]


@dataclass(frozen=True)
class SyncRanks:
    """The ranks of a weight sync."""

    union: World
    """Ranks that train the model, and ranks that receive its weights."""
    path: World
    """The source, and the ranks that receive."""
    source: int
    """First rank that trains the model, in the run."""

    @classmethod
    def of(cls, trains: World, receives: World) -> Self:
        """Create the process groups for the ranks of both sides. Every rank of the run makes this call."""
        source = trains.members[0]
        union = trains.part(sorted({*trains.members, *receives.members}))
        return cls(union, trains.part(sorted({source, *receives.members})), source)

    def of_source(self, value: T | None) -> T:
        """Return the source's value on every rank of the union."""
        return cast("T", self.union.broadcast_object(value, source=self.union.members.index(self.source)))


class WeightBroadcast:
    """Broadcasts the weights of a model from the source to the receiving ranks."""

    def __init__(self, ranks: SyncRanks, model: TrainedModel) -> None:
        self._path = ranks.path
        self._source = ranks.path.members.index(ranks.source)
        self._model = model
        self.checksums: dict[str, int] = {}
        """Checksums of the last sync by weight, on the ranks of the path; empty if it was not checked."""

    def send(self, lm: PreTrainedModel, *, everything: bool, checked: bool) -> None:
        """Gather the weights of the model and broadcast them. Every rank that trains it makes this call.

        Args:
            lm: the model.
            everything: as in `TrainedModel.buckets`.
            checked: compute checksums.
        """
        buckets = self._buckets(everything=everything)
        weights = {weight.name: weight for weight in base_weights(lm)}
        sent = [weights[weight.name] for bucket in buckets for weight in bucket.weights]
        full = full_weights(sent, bucket_elements=BUCKET_ELEMENTS)
        if self._path.is_member:
            deque(self._broadcast(buckets, full, checked=checked), maxlen=0)
        deque(full, maxlen=0)  # the other ranks only gather; its end releases the last weights

    def receive(self, *, everything: bool, checked: bool) -> Iterator[tuple[str, Tensor, bool]]:
        """Receive the weights for `InferenceWeights.build`; arguments as in `send`. A weight is valid until the next
        one."""
        buckets = self._buckets(everything=everything)
        for weight, values in self._broadcast(buckets, iter(()), checked=checked):
            yield weight.name, values, False

    def _buckets(self, *, everything: bool) -> list[Bucket]:
        return self._model.buckets(everything=everything, bucket_elements=BUCKET_ELEMENTS)

    def _broadcast(
        self, buckets: Sequence[Bucket], sent: Iterator[BaseWeight], *, checked: bool
    ) -> Iterator[tuple[SentWeight, Tensor]]:
        """Broadcast buckets, all in one buffer; yields weights and their values. `sent` has the weights on the source,
        and is empty on other ranks."""
        self.checksums = {}
        largest = max((bucket.nbytes for bucket in buckets), default=0)
        buffer = torch.empty(largest, dtype=torch.uint8, device=self._path.device)
        for bucket in buckets:
            message = buffer[: bucket.nbytes]
            views = bucket.views(message)
            for view, weight in zip(views, sent, strict=False):
                view.copy_(weight.merged())
            self._path.broadcast(message, source=self._source)
            if checked:
                sums = torch.stack([checksum(view.view(-1)) for view in views]).tolist()
                self.checksums |= {weight.name: value for weight, value in zip(bucket.weights, sums, strict=True)}
            yield from zip(bucket.weights, views, strict=True)


def checksum(values: Tensor) -> Tensor:
    """Return a checksum of a flat tensor, an int64 scalar that depends on values and their order.

    It is the sum, modulo 2**64, of the row sums and column sums of a table of 1024 columns, each times a different
    random number.
    """
    words = values.view(_INTEGERS[values.dtype.itemsize])
    whole = len(words) // _COLUMNS * _COLUMNS
    table = words[:whole].view(-1, _COLUMNS)
    sums = [table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64), words[whole:].long()]
    factors = torch.randint(-(2**63), 2**63 - 1, (sum(map(len, sums)),), generator=torch.Generator().manual_seed(0)).to(
        values.device
    )
    return (torch.cat(sums) * factors).sum()


def compare_checksums(ranks: SyncRanks, mine: dict[str, int], *, update: int) -> None:
    """Compare the checksums of received weights with those of the source. Every rank of the union makes this call.

    Args:
        ranks: the ranks of the sync.
        mine: checksums of this rank.
        update: number of optimizer updates of the weights, for the message.

    Raises:
        UserError: on every rank, for the first weight that differs.
    """
    sent = ranks.of_source(mine)
    wrong = next((name for name, value in mine.items() if sent[name] != value), None)
    for rank, name in zip(ranks.union.members, ranks.union.all_gather_objects(wrong), strict=True):
        if name is not None:
            raise UserError(
                f"weights must arrive as they were sent, {name} from rank {ranks.source} differs on rank {rank} in the "
                f"weight sync of update {update}: check the memory of both hosts and the network between them"
            )
