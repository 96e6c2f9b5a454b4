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
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybrid_rlhf.functional.transfers import moved
from hybrid_rlhf.runtime.world import World

RAGGED = "routes.experts", "images.digests", "teacher_prompts.ids"
"""Ends of the names of tensors that have any number of entries for each row."""
RAGGED_LENGTHS = "routes.lengths", "images.lengths", "teacher_prompts.lengths"
"""Ends of the names of those that have these numbers."""
_NUMBERS = "numbers"
_LENGTHS = "lengths"
_TOKENS = "tokens."
"""Prefix of the names of tensors with an entry for each token."""
READ_BY_LOSSES = {
    "response_mask",
    "sampled_logprobs",
    "drawn_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "teacher_top",
    "old_values",
    "groups",
    "rewards",
    "advantages",
    "returns",
    "selected",
}
"""Tensors of a micro-batch that losses find on their device; they find the others on the host."""
T = TypeVar("T")


class Rows(ABC):
    """Rows of a rollout, alone or with their advantages: tensors by name, each with an entry for each row."""

    metrics: Mapping[str, float]

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def lengths(self) -> Tensor:
        """[n] int64, tokens of each row."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metrics: Mapping[str, float]) -> Self:
        """The rows that `tensors` of others describes."""

    def rows(self, indices: Sequence[int | None]) -> Self:
        """Some rows, cut to the longest of them; None gives an empty row that does not count."""
        index = torch.tensor([0 if i is None else i for i in indices], dtype=torch.long)
        present = torch.tensor([i is not None for i in indices], dtype=torch.bool)
        width = max(torch.where(present, self.lengths[index], 1).tolist(), default=1)
        tensors = self.tensors()
        picked = {}
        for name, tensor in tensors.items():
            if name.endswith(RAGGED):
                parts = tensor.split(tensors[f"{name.rpartition('.')[0]}.lengths"].tolist())
                picked[name] = torch.cat([tensor[:0], *(parts[i] for i in indices if i is not None)])
                continue
            of_rows = tensor[index]
            if name.endswith(RAGGED_LENGTHS):
                of_rows *= present
            elif name in ("response_mask", "rollout.response_mask"):
                of_rows &= present[:, None]
            elif name in ("attention_mask", "rollout.attention_mask"):  # models read at least one token of each row
                of_rows[:, 1:] &= present[:, None]
            picked[name] = of_rows[:, :width] if of_rows.dim() >= 2 else of_rows
        return self.from_tensors(picked, self.metrics)

    def for_loss(self, device: torch.device) -> Self:
        """The rows with the tensors that losses read on a device; the others stay on the host."""
        tensors = self.tensors()
        read = {name: tensors[name] for name in tensors if name.removeprefix("rollout.") in READ_BY_LOSSES}
        return self.from_tensors(tensors | moved(read, device), self.metrics)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of several parts, padded to the longest; without metrics."""
        whole: dict[str, list[Tensor]] = {name: [] for part in parts for name in part.tensors()}
        for part in parts:
            absent = {name: torch.zeros(len(part), dtype=torch.long) for name in whole if name.endswith(RAGGED_LENGTHS)}
            for name, tensor in (absent | part.tensors()).items():
                whole[name].append(tensor)
        return cls.from_tensors({name: _joined(tensors) for name, tensors in whole.items()}, {})


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
    begins: Tensor
    """[N] int64, tokens of each row before its first response token; 0 without one."""
    prompts: Tensor
    """[N] int64, place of each row's prompt in the step."""
    holders: list[int]
    """[N] rank of each row."""
    mine: list[int]
    """[n] numbers of this rank's rows, in their order."""
    _counts: list[int]
    """Number of rows of each rank."""
    _order: Tensor
    """[N] int64, place of each row among the rows of all ranks, one rank after the other."""

    @classmethod
    def of(cls, groups: Tensor, lengths: Tensor, response_mask: Tensor, world: World) -> Self:
        """Number rows, of which each rank gives those that it holds. Every rank calls.

        Args:
            groups: [n] int64, place of each row's prompt in the step.
            lengths: [n] int64, tokens.
            response_mask: [n, T] bool, true on response tokens.
            world: the ranks.
        """
        begins = response_mask.int().argmax(dim=1)
        columns = torch.stack([groups, lengths, response_mask.sum(dim=1), begins])
        by_rank = [torch.from_numpy(of_rank) for of_rank in world.all_gather_objects(columns.numpy())]
        counts = [of_rank.shape[1] for of_rank in by_rank]
        whole = torch.cat(by_rank, dim=1)
        order = whole[0].argsort(stable=True)
        groups, lengths, responses, begins = whole[:, order]
        ranks = torch.arange(world.size).repeat_interleave(torch.tensor(counts))
        mine = order.argsort()[ranks == world.rank].tolist()
        return cls(world, lengths, responses, begins, groups, ranks[order].tolist(), mine, counts, order)

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
            return LocalRows(rows, self.mine)
        is_wanted = torch.zeros(len(self), dtype=torch.uint8)
        wanted = {row for numbers in micro_batches for row in numbers if row is not None}
        is_wanted[sorted(wanted) or [0]] = 1  # an empty row has the columns of another
        requests = self.world.all_gather(is_wanted.to(self.world.device)).cpu().bool()[:, self.mine]
        numbers = torch.tensor(self.mine, dtype=torch.long)
        parts = [_packed(rows.rows(wanted.nonzero()[:, 0].tolist()), numbers[wanted]) for wanted in requests]
        received = [part for part in _exchanged(parts, self.world) if part]
        mine = [number for part in received for number in part.pop(_NUMBERS).tolist()]
        here = rows.joined([rows.from_tensors(_unpacked(part), {}) for part in received])
        return LocalRows(here, mine)

    def collect(self, values: Mapping[str, Mapping[int, Tensor]], *, width: int) -> dict[str, Tensor]:
        """Return what ranks have computed for rows to those that hold the rows. Every rank calls, with the same names.

        Args:
            values: by name, [length] or [length, k] float32 of each row that this rank has computed, by number; a row
                is on one rank at most.
            width: T.

        Returns:
            by name, [n, T] or [n, T, k] float32 of this rank's rows, 0 after the values of a row, and in rows that no
            rank has computed.
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
                if of_row.dim() == whole[name].dim():  # the first of rows with several values for each token
                    whole[name] = whole[name].new_zeros(len(self.mine), width, of_row.shape[1])
                whole[name][place_of[int(row)], : len(of_row)] = of_row
        return whole


class LocalRows(Generic[R]):
    """Rows that this rank computes, on the host."""

    def __init__(self, rows: R, numbers: Sequence[int]) -> None:
        """Take rows and their numbers."""
        self._rows: R = rows
        self._place_of = {number: place for place, number in enumerate(numbers)}

    def __call__(self, numbers: Sequence[int | None]) -> R:
        """Some rows, cut to the longest; None is an empty row that does not count."""
        return self._rows.rows([None if number is None else self._place_of[number] for number in numbers])


def row_values(micro_batches: Iterable[tuple[Sequence[int | None], Tensor]], lengths: Tensor) -> dict[int, Tensor]:
    """Values of micro-batches by row, on the host without padding; empty rows are left out.

    Args:
        micro_batches: numbers of the rows, and values [n, t, ...], on any device, from which they come by one copy.
        lengths: [N] tokens of all rows.
    """
    parts = [(numbers, values.detach().float()) for numbers, values in micro_batches]
    if not parts:
        return {}
    on_host = torch.cat([values.flatten() for _, values in parts]).cpu().split([values.numel() for _, values in parts])
    return {
        number: of_row[: int(lengths[number])]
        for (numbers, values), flat in zip(parts, on_host, strict=True)
        for number, of_row in zip(numbers, flat.view(values.shape), strict=True)
        if number is not None
    }


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


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """A tensor of the rows of several parts."""
    if tensors[0].dim() >= 2:
        width = max(tensor.shape[1] for tensor in tensors)
        others = (0, 0) * (tensors[0].dim() - 2)
        tensors = [pad(tensor, (*others, 0, width - tensor.shape[1])) for tensor in tensors]
    return torch.cat([*tensors])


def _packed(rows: Rows, numbers: Tensor) -> dict[str, Tensor]:
    """The tensors of rows without padding, with the numbers [n] of the rows; {} without rows."""
    if not len(rows):
        return {}
    is_token = _is_token(rows.lengths)
    packed = {_NUMBERS: numbers, _LENGTHS: rows.lengths}
    for name, tensor in rows.tensors().items():
        has_tokens = tensor.dim() >= 2 and not name.endswith(RAGGED)
        packed |= {_TOKENS + name: tensor[is_token]} if has_tokens else {name: tensor}
    return packed


def _unpacked(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of rows from the result of `_packed`, padded to the longest row."""
    is_token = _is_token(packed.pop(_LENGTHS))
    tensors = {}
    for name, values in packed.items():
        if name.startswith(_TOKENS):
            whole = torch.zeros(*is_token.shape, *values.shape[1:], dtype=values.dtype)
            whole[is_token] = values
            values = whole
        tensors[name.removeprefix(_TOKENS)] = values
    return tensors


def _is_token(lengths: Tensor) -> Tensor:
    """[n, longest] bool, true on the tokens of right-padded rows."""
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _exchanged(parts: Sequence[Mapping[str, Tensor]], world: World) -> list[dict[str, Tensor]]:
    """Send part r to rank r; returns the parts received, by sender."""
    sent = [pickle.dumps({name: tensor.numpy() for name, tensor in part.items()}) if part else b"" for part in parts]
    received = [pickle.loads(content) if content else {} for content in world.exchange_bytes(sent)]  # nosec B301
    return [{name: torch.from_numpy(values) for name, values in part.items()} for part in received]
