"""Buckets of weights from rank to rank, and their checksums.

In a bucket each rank sends one message of bytes to each rank that needs something of it. The next message is packed, or
its memory prepared, while one travels. Ranks go through the buckets in the same order and wait only for messages of the
same bucket, so no two wait for each other in a circle.
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
"""Elements of a flattened tensor, and their values, flat."""
Checksums = dict[tuple[str, int, int], int]
"""By tensor, sending and receiving rank."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS = 1024


@dataclass(frozen=True)
class _Slot:
    """A piece in a message."""

    piece: Piece
    dtype: torch.dtype
    offset: int
    """Its first byte."""

    @property
    def stop(self) -> int:
        """The byte after its last."""
        return self.offset + self.piece.elements * self.dtype.itemsize

    def values(self, message: Tensor) -> Tensor:
        """[elements] of the message, a view."""
        return message[self.offset : self.stop].view(self.dtype)


class WeightTransfer:
    """Sends buckets from the ranks that train to those that sample."""

    def __init__(self, world: World, buckets: Sequence[Bucket], dtypes: Mapping[str, torch.dtype]) -> None:
        """Take the ranks of both, the buckets, whose ranks are numbers in `world`, and the dtypes that travel."""
        self._world = world
        self._buckets = [
            (bucket.weights, self._messages(bucket, dtypes, sends=True), self._messages(bucket, dtypes, sends=False))
            for bucket in buckets
        ]
        self.sent_bytes = 0
        """By this rank in the last transfer."""
        self.checksums: Checksums = {}
        """Of the last transfer on this rank, if it was checked."""

    def send(self, held: HeldWeights, *, checked: bool) -> None:
        """Send what others need of this rank's tensors.

        Args:
            held: this rank's tensors.
            checked: whether to compute checksums.
        """
        self._begin()
        before: Exchange | None = None
        for _, outgoing, _ in self._buckets:
            packed: dict[tuple[tuple[str, tuple[Runs, ...]], ...], Tensor] = {}
            messages = {}
            for peer, slots in outgoing.items():
                key = tuple((slot.piece.tensor, slot.piece.runs) for slot in slots)
                if key not in packed:  # ranks that compute the same part of the model need the same message
                    packed[key] = self._packed(slots, held)
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
        """Receive the buckets in order: weights, and the parts of their tensors that arrived, valid until the next.

        Args:
            checked: whether to compute checksums.
        """
        self._begin()
        ahead = self._expect(0)
        for number, (weights, _, incoming) in enumerate(self._buckets):
            exchange, messages = ahead
            ahead = self._expect(number + 1)
            exchange.wait()
            yield weights, self._unpacked(incoming, messages, checked=checked)

    def _begin(self) -> None:
        self.sent_bytes, self.checksums = 0, {}

    def _messages(
        self, bucket: Bucket, dtypes: Mapping[str, torch.dtype], *, sends: bool
    ) -> dict[int, tuple[_Slot, ...]]:
        """The pieces that this rank sends or receives, by the other rank."""
        messages: dict[int, list[_Slot]] = defaultdict(list)
        for piece in bucket.pieces:
            mine, peer = (piece.source, piece.target) if sends else (piece.target, piece.source)
            if mine == self._world.rank:
                dtype, message = dtypes[piece.tensor], messages[peer]
                end = message[-1].stop if message else 0
                message.append(_Slot(piece, dtype, -(-end // dtype.itemsize) * dtype.itemsize))
        return {peer: tuple(slots) for peer, slots in messages.items()}

    def _packed(self, slots: Sequence[_Slot], held: HeldWeights) -> Tensor:
        message = torch.empty(slots[-1].stop, dtype=torch.uint8, device=self._world.device)
        for slot in slots:
            name = slot.piece.tensor
            flat, values, done = held.flat(name), slot.values(message), 0
            first = held.intervals.get(name, (0, 0))[0]
            for runs in slot.piece.runs:
                part = values[done : done + runs.elements]
                part.view(runs.count, runs.length).copy_(runs.moved(-first).view(flat))
                done += runs.elements
        return message

    def _expect(self, number: int) -> tuple[Exchange, dict[int, Tensor]]:
        """Begin to receive a bucket, if there is one."""
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
    """[] int64 of a flat tensor, which another value or another order changes: sums of rows and of columns of 1024,
    modulo 2**64, each times a random number of its own."""
    words = values.view(_INTEGERS[values.dtype.itemsize])
    whole = len(words) // _COLUMNS * _COLUMNS
    table = words[:whole].view(-1, _COLUMNS)
    sums = [table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64), words[whole:].long()]
    factors = torch.randint(-(2**63), 2**63 - 1, (sum(map(len, sums)),), generator=torch.Generator().manual_seed(0)).to(
        values.device
    )
    return (torch.cat(sums) * factors).sum()


def compare_checksums(world: World, mine: Checksums, *, update: int) -> None:
    """Compare what was sent with what arrived; every rank calls.

    Args:
        world: the ranks between which weights travelled.
        mine: of this rank.
        update: optimizer updates of the weights, for the message.

    Raises:
        UserError: on every rank, for the first tensor that differs.
    """
    each = world.all_gather_objects(mine)
    for rank, checksums in enumerate(each):
        for (name, source, target), value in checksums.items():
            if rank == source and each[target].get((name, source, target)) != value:
                raise UserError(
                    f"weights must arrive as they were sent, {name} from rank {world.members[source]} differs on "
                    f"rank {world.members[target]} in the weight sync of update {update}: check the memory of both "
                    "hosts and the network between them"
                )
