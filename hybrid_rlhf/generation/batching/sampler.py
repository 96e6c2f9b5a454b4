"""Token sampling: the state and sampling parameters of all rows as tensors, and one token per row from the logits.

Row i of the tables belongs to the i-th live completion. Why tables: a step then needs no data from the host, so it can
be captured in a CUDA graph, and the host can process its result while the next step runs. Most numbers of a row are in
two tables, so a row moves with few copies.

A token is drawn by inverting the cumulative distribution at one uniform number, in two levels: first the block of the
vocabulary, then the token in the block. This costs one exponential per logit and no sort. With a sharded vocabulary,
ranks exchange two numbers per row and then the token; only truncation (top_p, top_k, min_p) and penalties gather the
logits. Nothing synchronises with the host.

Kernels compute the same result from an unsharded vocabulary, without a sort (ops/cpu_kernels.py, ops/sampling.py). The
torch code here is their reference, and is used for sharded vocabularies and on CPUs without a compiler.

Cumulative sums are taken over integers: a float `cumsum` has no deterministic kernel on CUDA (pytorch issue 75240), and
torch refuses it under `deterministic: true`. Integer sums do not depend on their order, so a row draws the same token
on every device and in every batch.

Shapes: B or S rows, V vocabulary, R ranks; logits are [B, V / R] float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.generation.architecture.model_description import share
from hybrid_rlhf.generation.batching.grammar import WORD_TOKENS
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops.sampling import (
    FLOATS,
    IN_COMPLETION,
    IN_TEXT,
    INTEGERS,
    SamplingMode,
    SamplingRows,
    draw,
    gather_vocabulary,
    truncated,
)
from hybrid_rlhf.generation.sampling import MOST_TOP_LOGPROBS
from hybrid_rlhf.generation.transfers import to_device
from hybrid_rlhf.runtime.world import World, solo_world


def sampling_mode(requests: Sequence[Request]) -> SamplingMode:
    """Return the sampling features that at least one of the requests needs."""
    distinct = {id(request.params): request.params for request in requests}.values()
    return SamplingMode(
        greedy=any(p.greedy for p in distinct),
        temperature=any(p.divisor != 1 for p in distinct),
        top_k_top_p=any(p.top_p < 1 or p.top_k > 0 for p in distinct),
        min_p=any(p.min_p > 0 for p in distinct),
        repetition_penalty=any(p.repetition_penalty != 1 for p in distinct),
        bias=any(p.adds_to_logits for p in distinct),
        min_new_tokens=any(p.min_new_tokens > 0 for p in distinct),
        grammar=any(request.grammar is not None for request in requests),
        top_logprobs=any(request.top_logprobs for request in requests),
    )


@dataclass
class DecodeBatch(SamplingRows):
    """Tables of S rows, filled from requests."""

    adapter: Tensor
    """[S] int64, the number of each row's adapter. Not in the tables, whose columns the sampling kernels read by
    index."""
    offset: Tensor | None = None
    """[S] int64, difference of position of rotation and index of each row's next token; none: tokens have one
    position."""

    @classmethod
    def empty(
        cls,
        rows: int,
        requests: Sequence[Request],
        *,
        vocab_size: int,
        device: torch.device,
        has_axes: bool = False,
    ) -> DecodeBatch:
        """Allocate tables that are wide enough for any of the requests; `has_axes` is that of the model."""
        stops = max(len(request.stop) for request in requests)
        longest = max(len(request.uniforms) for request in requests)
        mode = sampling_mode(requests)
        seen = None
        if mode.repetition_penalty or mode.bias:
            seen = torch.zeros(rows, vocab_size, dtype=torch.uint8, device=device)
        bias = torch.zeros(rows, vocab_size, device=device) if mode.bias else None
        allowed = None
        if mode.grammar:
            allowed = torch.zeros(rows, -(-vocab_size // WORD_TOKENS), dtype=torch.int32, device=device)
        integers = torch.zeros(rows, len(INTEGERS) + stops, dtype=torch.long, device=device)
        floats = torch.ones(rows, len(FLOATS) + longest, dtype=torch.float64, device=device)
        adapter = torch.zeros(rows, dtype=torch.long, device=device)
        offset = torch.zeros(rows, dtype=torch.long, device=device) if has_axes else None
        return cls(integers, floats, seen, bias, allowed, adapter, offset)

    @classmethod
    def of(cls, requests: Sequence[Request], *, vocab_size: int, device: torch.device) -> DecodeBatch:
        """Return tables filled with requests, one per row."""
        rows = cls.empty(len(requests), requests, vocab_size=vocab_size, device=device)
        rows.fill(0, requests)
        return rows

    def has_room_for(self, requests: Sequence[Request]) -> bool:
        """True if the tables are wide enough for each of the requests, given that they have the tables of their
        mode."""
        stops = self.integers.shape[1] - len(INTEGERS)
        longest = self.floats.shape[1] - len(FLOATS)
        return all(len(request.stop) <= stops and len(request.uniforms) <= longest for request in requests)

    @property
    def nbytes(self) -> int:
        """Total bytes of the tables."""
        return sum(table.nbytes for table in self._tables())

    def __len__(self) -> int:
        """Number of rows S."""
        return len(self.integers)

    def fill(self, first: int, requests: Sequence[Request]) -> None:
        """Write requests into the rows from `first` on, with the tokens that they have so far."""
        numbers = len(INTEGERS)
        integers = np.zeros((len(requests), self.integers.shape[1]), dtype=np.int64)
        floats = np.zeros((len(requests), self.floats.shape[1]))
        for row, request in enumerate(requests):
            stop = sorted(request.stop)
            params = request.params
            least = params.min_new_tokens if stop else 0
            drawn = len(request.token_ids)
            flags = [int(params.greedy), least, int(params.adds_to_logits), int(request.grammar is not None)]
            integers[row, :numbers] = [0, request.tokens - 1, drawn, params.top_k, *flags]
            # Rows with fewer stop tokens repeat their first one.
            integers[row, numbers:] = (stop + stop[:1] * integers.shape[1])[: integers.shape[1] - numbers] or 0
            floats[row, : len(FLOATS)] = [getattr(params, name) for name in FLOATS]
            floats[row, len(FLOATS) : len(FLOATS) + len(request.uniforms)] = request.uniforms
        part = slice(first, first + len(requests))
        self.integers[part] = to_device(torch.from_numpy(integers), self.integers.device)
        self.floats[part] = to_device(torch.from_numpy(floats), self.floats.device)
        self.adapter[part] = to_device([request.adapter for request in requests], self.adapter.device, torch.long)
        if self.offset is not None:
            offsets = [0 if request.images is None else request.images.offset for request in requests]
            self.offset[part] = to_device(offsets, self.offset.device, torch.long)
        if self.seen is not None:
            self.seen[part] = 0
            for row, request in enumerate(requests, start=first):
                self.seen[row, to_device(sorted(set(request.prompt)), self.seen.device)] = IN_TEXT
                if request.token_ids:
                    drawn_ids = to_device(sorted(set(request.token_ids)), self.seen.device)
                    self.seen[row, drawn_ids] = IN_TEXT | IN_COMPLETION
        if self.bias is not None:
            self.bias[part] = 0.0
            for row, request in enumerate(requests, start=first):
                if biases := _biases(request):
                    tokens = to_device(list(biases), self.bias.device, torch.long)
                    self.bias[row, tokens] = to_device(list(biases.values()), self.bias.device, torch.float32)

    def move(self, source: int, target: int) -> None:
        """Copy row `source` to row `target`."""
        for table in self._tables():
            table[target] = table[source]

    def view(self, start: int, stop: int) -> DecodeBatch:
        """Return views of rows start to stop - 1."""
        return self._of_each(lambda table: table[start:stop])

    def select(self, rows: Tensor) -> DecodeBatch:
        """Return copies of rows [n]."""
        return self._of_each(lambda table: table[rows])

    def save(self) -> list[Tensor]:
        """Return copies of the tables, for `restore`."""
        return [table.clone() for table in self._tables()]

    def restore(self, saved: Sequence[Tensor]) -> None:
        """Write back the result of `save`."""
        for table, values in zip(self._tables(), saved, strict=True):
            table.copy_(values)

    def _of_each(self, part: Callable[[Tensor], Tensor]) -> DecodeBatch:
        """Return a part of all tables."""
        parts: dict[str, Any] = {name: table if table is None else part(table) for name, table in vars(self).items()}
        return DecodeBatch(**parts)

    def _tables(self) -> list[Tensor]:
        return [table for table in vars(self).values() if table is not None]


def _biases(request: Request) -> dict[int, np.float32]:
    """Return what is added to the logits of a request's tokens, summed in the order in which sampling adds it."""
    params = request.params
    biases = {token: np.float32(bias) for token, bias in params.logit_bias.items()}
    if params.presence_penalty or params.frequency_penalty:
        frequency = np.float32(params.frequency_penalty)
        first = frequency + np.float32(params.presence_penalty)
        seen = set[int]()
        for token in request.token_ids:
            biases[token] = biases.get(token, np.float32(0)) - (frequency if token in seen else first)
            seen.add(token)
    return biases


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens [B] int64, and their log-probs [B] float32 under the full distribution and the sampled one."""

    tokens: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor
    top: tuple[Tensor, Tensor] | None = None
    """Most likely tokens [B, k] int64 of the full distribution and their log-probs [B, k] float32; none if no request
    reports them."""

    def stacked(self) -> Tensor:
        """Return all values in one tensor [3 + 2k, B] for the copy to the host; its float64 represents token ids
        exactly."""
        columns = [self.tokens, self.logprobs, self.sampling_logprobs]
        if self.top is not None:
            columns += [column for part in self.top for column in part.unbind(dim=1)]
        return torch.stack([column.double() for column in columns])


class Sampler:
    """Samples tokens; one sampler is used for all steps of a call."""

    def __init__(self, vocab_size: int, mode: SamplingMode, world: World) -> None:
        """Args: size of the vocabulary, sampling features of the requests, and the ranks that shard the vocabulary."""
        self._vocab_size = vocab_size
        self._mode = mode
        self._world = world
        self._mine = share(vocab_size, world.rank, world.size)
        self._kernels = choice.kernels_for(world.device, torch.float32) if world.size == 1 else None

    def __call__(self, logits: Tensor, rows: SamplingRows) -> SampledTokens:
        """Sample the next token of each row and append it to the row."""
        top = self._top(logits, rows) if self._mode.top_logprobs else None  # before kernels may overwrite logits
        if self._kernels is not None:
            tokens, logprobs, sampling_logprobs = self._kernels.sample(logits, rows, self._mode)
            return SampledTokens(tokens, logprobs, sampling_logprobs, top)
        mode = self._mode
        greedy = rows.greedy if self._mode.greedy else None
        if mode.draws_from_all:
            scaled = self._scaled(logits, rows)
            tokens, logprobs = draw(scaled, rows.uniform, greedy, self._mine, self._world)
            sampling_logprobs = logprobs
        else:
            logits = gather_vocabulary(logits, self._vocab_size, self._world)
            masked = truncated(self._scaled(self._penalised(logits, rows), rows), rows, mode)
            whole = range(logits.shape[-1])
            alone = solo_world(logits.device)
            tokens, sampling_logprobs = draw(masked, rows.uniform, greedy, whole, alone)
            raw = torch.log_softmax(self._scaled(logits, rows), dim=-1)
            logprobs = raw.gather(1, tokens[:, None]).squeeze(1)
        rows.append(tokens)
        return SampledTokens(tokens, logprobs, sampling_logprobs, top)

    def _top(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        whole = gather_vocabulary(logits, self._vocab_size, self._world)
        logprobs = torch.log_softmax(self._scaled(whole, rows), dim=-1)
        values, tokens = logprobs.topk(min(MOST_TOP_LOGPROBS, logprobs.shape[-1]), dim=-1)
        return tokens, values

    def _scaled(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return logits / rows.temperature if self._mode.temperature else logits

    def _penalised(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Apply the repetition penalty (arXiv 1909.05858, section 4.1), add biases, exclude tokens that the grammar
        does not allow, and stop tokens before min_new_tokens."""
        if rows.seen is not None and self._mode.repetition_penalty:
            penalty = rows.repetition_penalty
            logits = torch.where(rows.seen > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if rows.bias is not None and self._mode.bias:
            logits = logits + rows.bias
        forbidden = rows.forbidden if self._mode.grammar else None
        if forbidden is not None:
            logits = logits.masked_fill(forbidden[:, : logits.shape[-1]], -torch.inf)
        if self._mode.min_new_tokens:
            stops, early = rows.early_stops
            logits = logits.scatter(1, stops, logits.gather(1, stops).masked_fill(early, -torch.inf))
        return logits
