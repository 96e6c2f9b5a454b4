"""Where the rows of a rollout are, and how rows travel between ranks.

No rank holds a whole rollout: each has all completions of some prompts, on the host. Statistics over the completions of
a prompt need no communication then; those over a rollout are sums over ranks, or need one number per row, which
`RowIndex.gather` collects. Lengths decide which rank computes a row, so models read rows on other ranks than those that
hold them: `RowIndex.fetch` brings the rows that a rank computes, `RowIndex.collect` returns what it computed.

Rows are numbered by prompt, so that the plan of a step does not depend on the number of ranks.

Shapes: N rows over all ranks, n rows on this rank, T time.
"""

from __future__ import annotations

import pickle  # between the ranks of a run, as torch's collectives of objects do  # nosec B403
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybrid_rlhf.runtime.world import World

RAGGED = "routes.experts"
"""End of the name of a tensor that has any number of entries for each row,"""
RAGGED_LENGTHS = "routes.lengths"
"""and of the one that has these numbers."""
_NUMBERS = "numbers"
_LENGTHS = "lengths"
_TOKENS = "tokens."
"""Prefix of the names of tensors with an entry for each token."""
T = TypeVar("T")


class Rows(Protocol):
    """Rows of a rollout, alone or with their advantages."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> Tensor:
        """[n] int64, tokens of each row."""

    def rows(self, indices: Sequence[int | None]) -> Self:
        """Some of the rows; None is an empty row that does not count."""

    def to(self, device: torch.device) -> Self:
        """The rows on a device."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metrics: Mapping[str, float]) -> Self:
        """The rows that `tensors` gave."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of several parts."""


R = TypeVar("R", bound=Rows)


@dataclass(frozen=True)
class RowIndex:
    """The numbers of a rollout's rows, and the ranks that hold them."""

    world: World
    """The ranks that hold rows."""
    lengths: Tensor
    """[N] int64, real tokens of each row."""
    responses: Tensor
    """[N] int64, response tokens of each row."""
    holders: list[int]
    """[N] rank of each row."""
    mine: list[int]
    """[n] numbers of this rank's rows, in their order."""
    _counts: list[int]
    """Number of rows of each rank."""
    _order: Tensor
    """[N] int64, place of each row among the rows of all ranks, one rank after the other."""

    @classmethod
    def of(cls, groups: Tensor, lengths: Tensor, responses: Tensor, world: World) -> Self:
        """Number rows, of which each rank gives those that it holds. Every rank calls.

        Args:
            groups: [n] int64, place of each row's prompt in the step.
            lengths: [n] int64, tokens.
            responses: [n] int64, response tokens.
            world: the ranks.
        """
        columns = torch.stack([groups, lengths, responses])
        by_rank = [torch.from_numpy(of_rank) for of_rank in world.all_gather_objects(columns.numpy())]
        counts = [of_rank.shape[1] for of_rank in by_rank]
        groups, lengths, responses = torch.cat(by_rank, dim=1)
        order = groups.argsort(stable=True)
        ranks = torch.arange(world.size).repeat_interleave(torch.tensor(counts))
        mine = order.argsort()[ranks == world.rank].tolist()
        return cls(world, lengths[order], responses[order], ranks[order].tolist(), mine, counts, order)

    def __len__(self) -> int:
        return len(self.holders)

    def gather(self, column: Tensor) -> Tensor:
        """The numbers [N, ...] of all rows, from those of this rank's rows [n, ...]. Every rank calls."""
        if self.world.size == 1:
            return column[self._order]
        numbers = column.view(torch.uint8) if column.dtype is torch.bool else column
        padded = pad(numbers, (*(0, 0) * (column.dim() - 1), 0, max(self._counts) - len(column)))
        by_rank = self.world.all_gather(padded.to(self.world.device)).cpu()
        whole = torch.cat([of_rank[:count] for of_rank, count in zip(by_rank, self._counts, strict=True)])
        return whole.to(column.dtype)[self._order]

    def bring(self, items: Sequence[T], *, everywhere: bool = False) -> list[T]:
        """The picklable items [N] of all rows on the first rank, or on every rank, from those of this rank's rows [n];
        [] on other ranks. Every rank calls."""
        content = pickle.dumps(list(zip(self.mine, items, strict=True)))
        received = self.world.exchange_bytes(
            [content if everywhere or rank == 0 else b"" for rank in range(self.world.size)]
        )
        numbered = [pair for part in received if part for pair in pickle.loads(part)]  # nosec B301
        return [item for _, item in sorted(numbered, key=lambda pair: pair[0])]

    def fetch(self, rows: R, micro_batches: Iterable[Sequence[int | None]]) -> LocalRows[R]:
        """Bring rows to this rank, without metrics. Every rank calls.

        Args:
            rows: the rows that this rank holds.
            micro_batches: numbers of the rows that this rank reads, in any parts; a row may be in several.
        """
        if self.world.size == 1:
            return LocalRows(rows, self.mine, self.world.device)
        is_wanted = torch.zeros(len(self), dtype=torch.uint8)
        wanted = {row for numbers in micro_batches for row in numbers if row is not None}
        is_wanted[sorted(wanted) or [0]] = 1  # an empty row has the columns of another
        requests = self.world.all_gather(is_wanted.to(self.world.device)).cpu().bool()[:, self.mine]
        tensors = rows.tensors()
        lengths = rows.lengths.tolist()
        parts = [_packed(tensors, lengths, requested.nonzero()[:, 0].tolist(), self.mine) for requested in requests]
        received = [part for part in _exchanged(parts, self.world) if part]
        numbers = [number for part in received for number in part[_NUMBERS].tolist()]
        return LocalRows(rows.from_tensors(_unpacked(received), {}), numbers, self.world.device)

    def collect(self, values: Mapping[str, Mapping[int, Tensor]], *, width: int) -> dict[str, Tensor]:
        """Return what ranks have computed for rows to those that hold the rows. Every rank calls, with the same names.

        Args:
            values: by name, [length] float32 of each row that this rank has computed, by number; a row is on one rank
                at most.
            width: T.

        Returns:
            by name, [n, T] float32 of this rank's rows, 0 after the values of a row, and in rows that no rank has
            computed.
        """
        parts: list[dict[str, Tensor]] = [{} for _ in range(self.world.size)]
        for name, of_rows in values.items():
            for number, of_row in of_rows.items():
                parts[self.holders[number]][f"{name} {number}"] = of_row
        place_of = {number: place for place, number in enumerate(self.mine)}
        whole = {name: torch.zeros(len(self.mine), width) for name in values}
        for part in parts if self.world.size == 1 else _exchanged(parts, self.world):
            for key, of_row in part.items():
                name, row = key.rsplit(" ", 1)
                whole[name][place_of[int(row)], : len(of_row)] = of_row
        return whole


class LocalRows(Generic[R]):
    """Rows that this rank computes, on the host; micro-batches of them travel to the device."""

    def __init__(self, rows: R, numbers: Sequence[int], device: torch.device) -> None:
        """Take rows, their numbers, and the device of the models."""
        self._rows: R = rows
        self._place_of = {number: place for place, number in enumerate(numbers)}
        self._device = device

    def __call__(self, numbers: Sequence[int | None]) -> R:
        """A micro-batch on the device, cut to its longest row; None is an empty row that does not count."""
        return self.on_host(numbers).to(self._device)

    def on_host(self, numbers: Sequence[int | None]) -> R:
        """Some rows on the host."""
        return self._rows.rows([None if number is None else self._place_of[number] for number in numbers])


def row_values(numbers: Sequence[int | None], values: Tensor, lengths: Tensor) -> dict[int, Tensor]:
    """Values [n, t] of a micro-batch by row, on the host without padding; empty rows are left out.

    Args:
        numbers: numbers of the rows.
        values: values on any device.
        lengths: [N] tokens of all rows.
    """
    values = values.detach().float().cpu()
    return {number: values[place, : int(lengths[number])] for place, number in enumerate(numbers) if number is not None}


def with_columns_of_all_ranks(rows: R, world: World, metrics: Mapping[str, float]) -> R:
    """This rank's rows with the tensors that only other ranks have, 0 in these rows, so that all ranks compute alike.
    Every rank calls."""
    tensors = rows.tensors()
    held = tensors if len(rows) else {}
    shapes = world.merge_dicts({name: (tensor.shape[1:], tensor.dtype) for name, tensor in held.items()})
    missing = {name: shapes[name] for name in shapes.keys() - tensors.keys()}
    zeros = {
        name: torch.zeros(0 if name.endswith(RAGGED) else len(rows), *shape, dtype=dtype)
        for name, (shape, dtype) in missing.items()
    }
    return rows.from_tensors({**tensors, **zeros}, metrics)


def restored_rows(
    kind: type[R], shards: Sequence[Mapping[str, Tensor]], prefix: str, metrics: Mapping[str, float], world: World
) -> R | None:
    """This rank's rows from the tensors that each rank stored under a prefix; None if no rank did. Every rank calls.

    On another number of ranks, each takes the rows of some ranks.
    """
    stored = [shard for shard in shards if any(name.startswith(prefix) for name in shard)]
    if not stored:
        return None
    mine = [shards[world.rank]] if len(shards) == world.size else stored[world.rank :: world.size]
    parts = [kind.from_tensors(named, metrics) for shard in mine if (named := without_prefix(prefix, shard))]
    rows = kind.joined(parts) if parts else kind.from_tensors(without_prefix(prefix, stored[0]), metrics).rows([])
    return with_columns_of_all_ranks(rows, world, metrics)


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with prefixed names, to be stored with others in a checkpoint."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `with_prefix` named, under their own names."""
    return {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}


def _packed(
    tensors: Mapping[str, Tensor], lengths: Sequence[int], places: Sequence[int], numbers: Sequence[int]
) -> dict[str, Tensor]:
    """Some rows of tensors without padding, with their numbers; {} without rows.

    Args:
        tensors: tensors of all rows of this rank.
        lengths: tokens of these rows.
        places: the rows to pack.
        numbers: numbers of all rows of this rank.
    """
    if not places:
        return {}
    chosen = torch.tensor(places)
    packed = {_NUMBERS: torch.tensor(numbers)[chosen], _LENGTHS: torch.tensor(lengths)[chosen]}
    for name, tensor in tensors.items():
        if name.endswith(RAGGED):
            parts = tensor.split(tensors[name.removesuffix(RAGGED) + RAGGED_LENGTHS].tolist())
            packed[name] = torch.cat([parts[place] for place in places])
        elif tensor.dim() == 2:
            packed[_TOKENS + name] = torch.cat([tensor[place, : lengths[place]] for place in places])
        else:
            packed[name] = tensor[chosen]
    return packed


def _unpacked(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of the rows of several results of `_packed`, padded to the longest row."""
    lengths = torch.cat([part[_LENGTHS] for part in parts]).tolist()
    tensors = {}
    for name in parts[0].keys() - {_NUMBERS, _LENGTHS}:
        flat = torch.cat([part[name] for part in parts])
        if name.startswith(_TOKENS):
            padded = torch.zeros(len(lengths), max(lengths), dtype=flat.dtype)
            for row, values in zip(padded, flat.split(lengths), strict=True):
                row[: len(values)] = values
            flat = padded
        tensors[name.removeprefix(_TOKENS)] = flat
    return tensors


def _exchanged(parts: Sequence[Mapping[str, Tensor]], world: World) -> list[dict[str, Tensor]]:
    """Send part r to rank r; returns the parts received, by sender."""
    sent = [pickle.dumps({name: tensor.numpy() for name, tensor in part.items()}) if part else b"" for part in parts]
    received = [pickle.loads(content) if content else {} for content in world.exchange_bytes(sent)]  # nosec B301
    return [{name: torch.from_numpy(values) for name, values in part.items()} for part in received]
