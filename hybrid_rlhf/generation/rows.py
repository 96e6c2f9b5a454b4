"""What the next token of every live row needs, as tensors on the device: row i belongs to slot i of the KV cache.

Why tables: a step then reads nothing from the host and leaves nothing there, so that it can be captured, and the host
may look at its result while the next one runs. All numbers of a row stand in two tables and move with two copies.

Shapes: S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.generation.requests import Request
from hybrid_rlhf.generation.sampling import SamplingParams

_INTEGERS = ("token", "position", "drawn", "top_k", "greedy", "min_new_tokens")
_FLOATS = ("divisor", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Mode:
    """Which parts of sampling any of the requests needs; the others are left out for all."""

    greedy: bool
    cool: bool
    cut_by_rank: bool
    cut_by_share: bool
    penalise: bool
    hold_stops: bool

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Mode:
        """What requests that are generated together need."""
        each = {id(request.params): request.params for request in requests}.values()
        return cls(
            greedy=any(p.takes_likeliest for p in each),
            cool=any(p.divisor != 1 for p in each),
            cut_by_rank=any(p.top_p < 1 or p.top_k > 0 for p in each),
            cut_by_share=any(p.min_p > 0 for p in each),
            penalise=any(p.repetition_penalty != 1 for p in each),
            hold_stops=any(p.min_new_tokens > 0 for p in each),
        )

    @property
    def draws_from_all(self) -> bool:
        """Whether nothing is cut or penalised."""
        return not (self.cut_by_rank or self.cut_by_share or self.penalise or self.hold_stops)


@dataclass
class Rows:
    """Tables of S rows."""

    integers: Tensor
    """[S, 6 + stop tokens] int64."""
    floats: Tensor
    """[S, 4 + longest completion] float64."""
    seen: Tensor | None
    """[S, V] bool, tokens of prompt and completion; none where nothing is penalised."""

    @classmethod
    def empty(cls, slots: int, requests: Sequence[Request], *, vocab_size: int, device: torch.device) -> Rows:
        """Tables that have room for any of the requests."""
        stops = max(len(request.stop) for request in requests)
        longest = max(len(request.uniforms) for request in requests)
        seen = None
        if Mode.of(requests).penalise:
            seen = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        integers = torch.zeros(slots, len(_INTEGERS) + stops, dtype=torch.long, device=device)
        floats = torch.ones(slots, len(_FLOATS) + longest, dtype=torch.float64, device=device)
        return cls(integers, floats, seen)

    @classmethod
    def of(cls, requests: Sequence[Request], *, vocab_size: int, device: torch.device) -> Rows:
        """Tables of requests, one a row, each before its first token."""
        rows = cls.empty(len(requests), requests, vocab_size=vocab_size, device=device)
        rows.enter(0, requests)
        return rows

    def has_room_for(self, requests: Sequence[Request]) -> bool:
        """Whether `enter` can take any of the requests."""
        stops, longest = self.integers.shape[1] - len(_INTEGERS), self.floats.shape[1] - len(_FLOATS)
        fits = all(len(request.stop) <= stops and len(request.uniforms) <= longest for request in requests)
        return fits and (self.seen is not None or not Mode.of(requests).penalise)

    def enter(self, slot: int, requests: Sequence[Request]) -> None:
        """Requests that have read their prompts take the slots from `slot` on."""
        integers = np.zeros((len(requests), self.integers.shape[1]), dtype=np.int64)
        floats = np.zeros((len(requests), self.floats.shape[1]))
        for row, request in enumerate(requests):
            stop, params = sorted(request.stop), request.params
            integers[row, :6] = _integers(request, params, holds=bool(stop))
            # Rows with fewer stop tokens name one of theirs again.
            integers[row, 6:] = (stop + stop[:1] * integers.shape[1])[: integers.shape[1] - 6] if stop else 0
            floats[row, :4] = [getattr(params, name) for name in _FLOATS]
            floats[row, 4 : 4 + len(request.uniforms)] = request.uniforms
        part = slice(slot, slot + len(requests))
        self.integers[part] = torch.from_numpy(integers).to(self.integers.device)
        self.floats[part] = torch.from_numpy(floats).to(self.floats.device)
        if self.seen is not None:
            self.seen[part] = False
            for row, request in enumerate(requests, start=slot):
                self.seen[row, torch.tensor(sorted(set(request.prompt)), device=self.seen.device)] = True

    def move(self, source: int, target: int) -> None:
        """Row `source` goes on in another slot."""
        for table in self._tables():
            table[target] = table[source]

    def part(self, start: int, stop: int) -> Rows:
        """Views of rows start to stop - 1."""
        seen = None if self.seen is None else self.seen[start:stop]
        return Rows(self.integers[start:stop], self.floats[start:stop], seen)

    def select(self, rows: Tensor) -> Rows:
        """Copies of the rows [n] named."""
        return Rows(self.integers[rows], self.floats[rows], None if self.seen is None else self.seen[rows])

    def save(self) -> list[Tensor]:
        """Copies of the tables, for `restore`."""
        return [table.clone() for table in self._tables()]

    def restore(self, saved: Sequence[Tensor]) -> None:
        """The tables as they were."""
        for table, values in zip(self._tables(), saved, strict=True):
            table.copy_(values)

    def take(self, tokens: Tensor) -> None:
        """Add a drawn token [S] to each row."""
        self.token.copy_(tokens)
        self.integers[:, 1:3] += 1
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)

    def _tables(self) -> list[Tensor]:
        return [self.integers, self.floats] if self.seen is None else [self.integers, self.floats, self.seen]

    @property
    def token(self) -> Tensor:
        """[S] drawn last."""
        return self.integers[:, 0]

    @property
    def position(self) -> Tensor:
        """[S] of the token drawn last."""
        return self.integers[:, 1]

    @property
    def drawn(self) -> Tensor:
        """[S] tokens of the completion so far."""
        return self.integers[:, 2]

    @property
    def top_k(self) -> Tensor:
        """[S, 1]."""
        return self.integers[:, 3:4]

    @property
    def greedy(self) -> Tensor:
        """[S] bool."""
        return self.integers[:, 4].bool()

    @property
    def held_stops(self) -> tuple[Tensor, Tensor]:
        """Stop tokens [S, n], and whether [S, 1] it is too early for them."""
        return self.integers[:, 6:], (self.drawn < self.integers[:, 5])[:, None]

    @property
    def temperature(self) -> Tensor:
        """[S, 1] float32."""
        return self.floats[:, 0:1].float()

    @property
    def top_p(self) -> Tensor:
        """[S, 1] float32."""
        return self.floats[:, 1:2].float()

    @property
    def min_p(self) -> Tensor:
        """[S, 1] float32."""
        return self.floats[:, 2:3].float()

    @property
    def repetition_penalty(self) -> Tensor:
        """[S, 1] float32."""
        return self.floats[:, 3:4].float()

    @property
    def uniform(self) -> Tensor:
        """[S] float64, the number that the next token is drawn with; a row that has ended takes its last again."""
        place = (self.drawn + len(_FLOATS)).clamp(max=self.floats.shape[1] - 1)
        return self.floats.gather(1, place[:, None]).squeeze(1)


def _integers(request: Request, params: SamplingParams, *, holds: bool) -> list[int]:
    """In the order of _INTEGERS: the row before its first token, which stands behind the prompt."""
    min_new_tokens = params.min_new_tokens if holds else 0
    return [0, len(request.prompt) - 1, 0, params.top_k, int(params.takes_likeliest), min_new_tokens]
