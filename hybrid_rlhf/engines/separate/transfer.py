"""Transfer of weights in buckets between ranks, and their checksums.

In each bucket, a rank sends one message of bytes to each rank that needs a part of it. While a message is sent, the
next one is packed, or its memory allocated. All ranks process the buckets in the same order and wait only for messages
of the same bucket, so there is no deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.separate.intervals import Runs
from hybrid_rlhf.engines.separate.layout import HeldWeights, SentWeight
from hybrid_rlhf.engines.separate.routes import Bucket, Piece
from hybrid_rlhf.runtime.point_to_point import Exchange
from hybrid_rlhf.runtime.world import World

Part = tuple[Runs, Tensor]
"""Elements of a flattened tensor, and their values as a flat tensor."""
Checksums = dict[tuple[str, int, int], int]
"""Checksums by (tensor, sending rank, receiving rank)."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS = 1024


@dataclass(frozen=True)
class _Slot:
    """Location of a piece in a message."""

    piece: Piece
    dtype: torch.dtype
    offset: int
    """Index of its first byte."""

    @property
    def stop(self) -> int:
        """Index of the byte after its last one."""
        return self.offset + self.piece.elements * self.dtype.itemsize

    def values(self, message: Tensor) -> Tensor:
        """Return the values [elements] in the message, as a view."""
        return message[self.offset : self.stop].view(self.dtype)


class WeightTransfer:
    """Sends buckets of weights from training ranks to receiving ranks."""

    def __init__(self, world: World, buckets: Sequence[Bucket], dtypes: Mapping[str, torch.dtype]) -> None:
        """Args: all these ranks, the buckets, whose ranks are indices in `world`, and the dtypes of the transfer."""
        self._world = world
        self._buckets = [
            (bucket.weights, self._messages(bucket, dtypes, sends=True), self._messages(bucket, dtypes, sends=False))
            for bucket in buckets
        ]
        self.sent_bytes = 0
        """Bytes that this rank sent in the last transfer."""
        self.checksums: Checksums = {}
        """Checksums of the last transfer on this rank, if it was checked."""

    def send(self, weights: HeldWeights, *, checked: bool) -> None:
        """Send the parts of this rank's tensors that other ranks need.

        Args:
            weights: this rank's tensors.
            checked: compute checksums.
        """
        self._begin()
        before: Exchange | None = None
        for _, outgoing, _ in self._buckets:
            packed: dict[tuple[tuple[str, tuple[Runs, ...]], ...], Tensor] = {}
            messages = {}
            for peer, slots in outgoing.items():
                key = tuple((slot.piece.tensor, slot.piece.runs) for slot in slots)
                if key not in packed:  # ranks that compute the same part of the model get the same message
                    packed[key] = self._packed(slots, weights)
                messages[peer] = packed[key]
                if checked:
                    self._record(slots, messages[peer])
            self.sent_bytes += sum(map(len, messages.values()))
            exchange = Exchange(self._world, sends=messages, receives={})
            if before is not None:
                before.wait()
            before = exchange
        if before is not None:
            before.wait()

    def receive(self, *, checked: bool) -> Iterator[tuple[tuple[SentWeight, ...], dict[str, list[Part]]]]:
        """Receive the buckets in order; yields weights, and the parts of their tensors, which are valid until the next
        yield.

        Args:
            checked: compute checksums.
        """
        self._begin()
        ahead = self._expect(0)
        for number, (weights, _, incoming) in enumerate(self._buckets):
            exchange, messages = ahead
            ahead = self._expect(number + 1)
            exchange.wait()
            yield weights, self._unpacked(incoming, messages, checked=checked)

    def _begin(self) -> None:
        self.sent_bytes = 0
        self.checksums = {}

    def _messages(
        self, bucket: Bucket, dtypes: Mapping[str, torch.dtype], *, sends: bool
    ) -> dict[int, tuple[_Slot, ...]]:
        """Return the pieces that this rank sends or receives, by peer rank."""
        messages: dict[int, list[_Slot]] = defaultdict(list)
        for piece in bucket.pieces:
            mine, peer = (piece.source, piece.target) if sends else (piece.target, piece.source)
            if mine == self._world.rank:
                dtype = dtypes[piece.tensor]
                message = messages[peer]
                end = message[-1].stop if message else 0
                message.append(_Slot(piece, dtype, -(-end // dtype.itemsize) * dtype.itemsize))
        return {peer: tuple(slots) for peer, slots in messages.items()}

    def _packed(self, slots: Sequence[_Slot], weights: HeldWeights) -> Tensor:
        message = torch.empty(slots[-1].stop, dtype=torch.uint8, device=self._world.device)
        for slot in slots:
            name = slot.piece.tensor
            flat = weights.flat(name)
            values = slot.values(message)
            done = 0
            first = weights.intervals.get(name, (0, 0))[0]
            for runs in slot.piece.runs:
                part = values[done : done + runs.elements]
                part.view(runs.count, runs.length).copy_(runs.moved(-first).view(flat))
                done += runs.elements
        return message

    def _expect(self, number: int) -> tuple[Exchange, dict[int, Tensor]]:
        """Start to receive a bucket, if there is one with this number."""
        incoming = self._buckets[number][2] if number < len(self._buckets) else {}
        messages = {
            peer: torch.empty(slots[-1].stop, dtype=torch.uint8, device=self._world.device)
            for peer, slots in incoming.items()
        }
        return Exchange(self._world, sends={}, receives=messages), messages

    def _unpacked(
        self, incoming: Mapping[int, Sequence[_Slot]], messages: Mapping[int, Tensor], *, checked: bool
    ) -> dict[str, list[Part]]:
        parts: dict[str, list[Part]] = defaultdict(list)
        for peer, slots in incoming.items():
            for slot in slots:
                values = slot.values(messages[peer])
                pieces = values.split([runs.elements for runs in slot.piece.runs])
                parts[slot.piece.tensor] += zip(slot.piece.runs, pieces, strict=True)
            if checked:
                self._record(slots, messages[peer])
        return parts

    def _record(self, slots: Sequence[_Slot], message: Tensor) -> None:
        sums = torch.stack([checksum(slot.values(message)) for slot in slots]).tolist()
        for slot, value in zip(slots, sums, strict=True):
            self.checksums[slot.piece.tensor, slot.piece.source, slot.piece.target] = value


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


def compare_checksums(world: World, mine: Checksums, *, update: int) -> None:
    """Compare checksums of sent and received tensors. Every rank must make this call.

    Args:
        world: the ranks of the transfer.
        mine: checksums of this rank.
        update: number of optimizer updates of the weights, for the message.

    Raises:
        UserError: on every rank, for the first tensor that differs.
    """
    of_ranks = world.all_gather_objects(mine)
    for rank, checksums in enumerate(of_ranks):
        for (name, source, target), value in checksums.items():
            if rank == source and of_ranks[target].get((name, source, target)) != value:
                raise UserError(
                    f"weights must arrive as they were sent, {name} from rank {world.members[source]} differs on "
                    f"rank {world.members[target]} in the weight sync of update {update}: check the memory of both "
                    "hosts and the network between them"
                )
