"""Attention of new tokens over the paged KV cache, in steps that mix prompts with decoding rows.

A step computes one token for each decoding row, and chunks of prompts. It first rotates queries and keys and writes the
new keys and values to the cache, so that a sequence can read blocks that another sequence computes in the same step. On
a GPU, one kernel then reads pages in place, for rows and chunks together (ops/attention.py; ops/latent.py for latents).
On a CPU there is a kernel for rows (cpu_kernels.py). Without a kernel, torch gathers the pages of each sequence. In
latent attention, keys and values of most chunks are first expanded from the latents into temporary pages.

Shapes: T tokens, B rows, A heads and K KV heads of this rank, G = A / K, D head size, R rotated dimensions, L new
tokens, S tokens in all, M blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation.architecture.model_description import Latent, ModelDescription, Split
from hybrid_rlhf.generation.model.cache import BLOCK_TOKENS, KVCache, blocks_of
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops.attention import attend, attend_rows
from hybrid_rlhf.generation.ops.rows import concatenated, rotated
from hybrid_rlhf.generation.transfers import to_device

_EXPANDED_TOKENS = 8192
"""Minimum number of tokens whose latents are expanded to keys and values at once. Fewer leave a GPU partly idle."""
Table = tuple[Tensor, Tensor] | None
"""Cosines and signed sines [T, 1, r] of the new tokens, for the first r dimensions of a head; none: no rotation."""
_Part = Callable[[int, int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention of a part of the tokens of a step in one layer: from kind, page table, queries [n, A, D], keys and values
in pages [P, BLOCK_TOKENS, K, D] and sinks to [n, A, D]."""


@dataclass(frozen=True)
class DecodeRows:
    """One token for each of B rows."""

    pages: Tensor
    """[page tables, B, M] int32, pages of each row."""
    positions: Tensor
    """[B] positions of the new tokens."""
    longest: int
    """Tokens of the longest row, including the new one. Not used by kernels, which read lengths from the device."""
    slots: Tensor | None = None
    """[B] slots of the states of recurrent layers (recurrent/states.py); none: the model has no such layer."""


@dataclass(frozen=True)
class Chunks:
    """Parts of prompts: chunk i has the tokens starts[i] to starts[i] + lengths[i] - 1 of its sequence."""

    pages: Tensor
    """[page tables, chunks, M] int32, pages of each chunk's sequence."""
    starts: Sequence[int]
    lengths: Sequence[int]
    slots: Tensor | None = None
    """[chunks] slots, as in DecodeRows."""
    spans: Sequence[tuple[tuple[int, int], ...]] = ()
    """For each chunk, (first, end) of the images whose tokens attend to each other in both directions; empty: there are
    none."""

    def some(self, members: Sequence[int]) -> Chunks:
        """Return the chunks of these indices, without slots."""
        pages = self.pages[:, to_device(members, self.pages.device)]
        return Chunks(pages, [self.starts[i] for i in members], [self.lengths[i] for i in members])


class Attention:
    """Data shared by all steps: score settings of the architecture, and the cache."""

    def __init__(
        self,
        architecture: ModelDescription,
        split: Split,
        cache: KVCache,
        *,
        capacity_tokens: int,
        kernels: ModuleType | None = None,
    ) -> None:
        """Args: the model, this rank's part of it, the cache, its maximum sequence length, and kernels if there are
        any."""
        self.architecture = architecture
        self.cache = cache
        self.kernels = kernels
        self.fused = choice.fused_kernels(kernels)
        self.kv_heads = [len(kv_heads) for kv_heads in split.kv_heads_of]
        """Number of KV heads of this rank, for each kind of attention."""
        self.groups = [len(split.heads) // count for count in self.kv_heads]
        """Number of queries per KV head, for each kind of attention."""
        device = cache.keys.device
        self._dtype = cache.keys.dtype
        self.alibi = None
        """[A, S] float32, ALiBi bias of the scores of each key; none: no ALiBi."""
        if architecture.alibi is not None:
            slopes = architecture.alibi[split.heads.start : split.heads.stop, None]
            slopes = slopes.bfloat16() if architecture.alibi_bfloat16 else slopes
            places = torch.arange(capacity_tokens)
            self.alibi = ((slopes * places).float() * architecture.alibi_scale).to(self._dtype).float().to(device)

    def step(self, rows: DecodeRows | None, chunks: Chunks | None = None) -> StepAttention:
        """Return the attention of a step, whose tokens are those of the rows, then those of each chunk."""
        return StepAttention(self, rows, chunks)

    def scores_of(self, kind: int) -> dict[str, Any]:
        """Return scale and soft cap of the scores, as keyword arguments of the attention functions."""
        return {"scale": self.architecture.kinds[kind].scale, "softcap": self.architecture.attention_softcap}

    def bias(self, kind: int, queries: Tensor, keys: int, spans: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Return the bias of scores [..., A or 1, S] for queries at positions [...]; -inf where a key is masked. In
        `spans`, queries also attend to later keys."""
        place = torch.arange(keys, device=queries.device)
        distance = queries[..., None] - place
        seen = distance >= 0
        for first, end in spans:
            seen |= ((queries >= first) & (queries < end))[..., None] & (place >= first) & (place < end)
        attention_kind = self.architecture.kinds[kind]
        if attention_kind.window is not None and keys > attention_kind.window:
            seen &= distance < (
                queries[..., None] % attention_kind.window + 1 if attention_kind.chunked else attention_kind.window
            )
        bias = torch.zeros((), dtype=self._dtype, device=queries.device).expand(seen.shape).unsqueeze(-2)
        if self.alibi is not None:
            bias = self.alibi[:, :keys].to(self._dtype)
            bias = bias.expand(*queries.shape, *bias.shape)
        return bias.masked_fill(~seen.unsqueeze(-2), -torch.inf)


class StepAttention:
    """Attention of one step. Values that are the same in all layers are computed once."""

    def __init__(self, attention: Attention, rows: DecodeRows | None, chunks: Chunks | None) -> None:
        self.attention = attention
        places: list[Tensor] = []
        self._parts: list[tuple[slice, _Part]] = []
        """Token ranges and the objects that compute them. With latent attention: indices into the absorbed tokens."""
        batch = 0 if rows is None else len(rows.positions)
        if rows is not None:
            sequences = torch.arange(batch, device=rows.positions.device)
            places.append(_places(rows.pages, sequences, rows.positions))
        if chunks is not None:
            places.append(_chunk_places(chunks))
        self.places = concatenated(places, dim=1)
        """[page tables, T] indices of the new tokens in a cache [P * BLOCK_TOKENS]."""
        self.absorbed: slice | Tensor | None = slice(None)
        """Tokens that latent attention computes in the absorbed form: those of rows, then those of some chunks; none:
        there are none."""
        self.expanded: list[ExpandedChunks] = []
        """Chunks that latent attention computes in the plain form."""
        if attention.architecture.latent is not None and chunks is not None:
            self.expanded, self.absorbed, chunks = _by_form(attention, attention.architecture.latent, batch, chunks)
        self.paged: PagedKernel | None = None
        """The kernel for rows and chunks, where one launch computes both; none: there is no such kernel."""
        if attention.fused is not None and not (chunks is not None and any(chunks.spans)):
            if rows is not None or chunks is not None:
                self.paged = PagedKernel(attention, rows, chunks)
                self._parts.append((slice(None), self.paged))
            return
        if rows is not None:
            decode = RowAttention(attention, rows) if attention.kernels is None else PagedKernel(attention, rows)
            self._parts.append((slice(batch), decode))
        if chunks is not None:
            self._parts.append((slice(batch, None), ChunkAttention(attention, chunks)))

    def __call__(self, layer: int, qkv: Tensor, table: Table, sinks: Tensor | None) -> Tensor:
        """Write the new keys and values to the cache and return attention outputs [T, A, D].

        Args:
            layer: index of the layer.
            qkv: queries, keys and values [T, A + 2 K, D]; only queries [T, A, D] for a layer that attends to the keys
                of another one.
            table: rotary positions.
            sinks: [A] scores of a key without a value (arXiv 2309.17453, section 3.1; gpt-oss).
        """
        attention = self.attention
        kind = attention.architecture.attention_of(layer)
        tables, keys, values = attention.cache.of_layer(layer)
        places = self.places[tables]
        if layer in attention.architecture.kv_sources:
            queries = qkv if table is None else rotated(qkv, *table)
        elif attention.fused is not None:
            queries = attention.fused.rotate_and_write(qkv, table, places, keys, values)
        else:
            kv_heads = keys.shape[2]
            qk, new_values = qkv.tensor_split([-kv_heads], dim=1)
            qk = qk if table is None else rotated(qk, *table)
            queries, new_keys = qk.tensor_split([-kv_heads], dim=1)
            for store, new in ((keys, new_keys), (values, new_values)):
                store.view(-1, *new.shape[1:]).index_copy_(0, places, new)
        return self.mixed(kind, tables, queries, keys, values, sinks)

    def mixed(
        self, kind: int, table: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Return attention outputs [n, A, D] for queries [n, A, D], over keys and values in pages."""
        return concatenated([part(kind, table, queries[tokens], keys, values, sinks) for tokens, part in self._parts])

    def latents(self, layer: int) -> PagedLatents:
        """Return the latents of a layer in the cache."""
        attention = self.attention
        a = attention.architecture
        kind = a.attention_of(layer)
        assert (a.kinds[kind].window, a.attention_softcap, attention.alibi, a.sinks) == (None, None, None, False)
        table, keys, _ = attention.cache.of_layer(layer)
        return PagedLatents(self, kind, table, keys)


@dataclass(frozen=True)
class PagedLatents:
    """Latents of a layer in the cache, and the attention of a step's tokens to them."""

    step: StepAttention
    kind: int
    """Index of the layer's kind of attention."""
    table: int
    """Index of the layer's page table."""
    keys: Tensor
    """[P, BLOCK_TOKENS, 1, R + L] rotated keys and latents."""


class RowAttention:
    """Attention of rows in torch: gathers the pages of all rows, up to the longest row."""

    def __init__(self, attention: Attention, rows: DecodeRows) -> None:
        self._attention = attention
        self._pages = rows.pages[:, :, : blocks_of(rows.longest)].long()
        keys = self._pages.shape[2] * BLOCK_TOKENS
        self._biases = [self._bias(kind, rows.positions, keys) for kind in range(len(attention.architecture.kinds))]

    def _bias(self, kind: int, positions: Tensor, keys: int) -> Tensor:
        """Return the bias of scores [B * K, G or 1, S]."""
        keys = min(keys, self._attention.alibi.shape[1]) if self._attention.alibi is not None else keys
        bias = self._attention.bias(kind, positions, keys)
        kv_heads = self._attention.kv_heads[kind]
        if bias.shape[1] == 1:
            return bias.repeat_interleave(kv_heads, dim=0)
        return bias.reshape(len(positions) * kv_heads, self._attention.groups[kind], -1)

    def __call__(self, kind: int, table: int, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Return [B, A, D] for queries [B, A, D], over keys and values in pages [P, BLOCK_TOKENS, K, D]."""
        bias = self._biases[kind]
        k, v = (
            store[self._pages[table]].flatten(1, 2)[:, : bias.shape[-1]].transpose(1, 2).flatten(0, 1)
            for store in (keys, values)
        )
        rows = q.reshape(len(k), -1, q.shape[-1])
        if sinks is not None:
            sinks = sinks.view(-1, rows.shape[1]).repeat(len(q), 1)
        return attend_rows(rows, k, v, bias=bias, sinks=sinks, **self._attention.scores_of(kind)).view(q.shape)


class PagedKernel:
    """Attention of rows and chunks by one launch of a kernel that reads pages in place. For rows alone, shapes do not
    depend on lengths, as a CUDA graph requires."""

    def __init__(
        self, attention: Attention, rows: DecodeRows | None, chunks: Chunks | None = None, *, expanded: bool = False
    ) -> None:
        """Args: shared data, rows and chunks; `expanded`: pages contain keys and values expanded from latents."""
        self._attention = attention
        a = attention.architecture
        self._latent = None if expanded else a.latent
        tables = [part.pages for part in (rows, chunks) if part is not None]
        self._pages = tables[0]
        if len(tables) > 1:
            most = max(pages.shape[2] for pages in tables)
            self._pages = torch.cat([functional.pad(pages, (0, most - pages.shape[2])) for pages in tables], dim=1)
        self._positions = self._pages.new_empty(0, dtype=torch.long) if rows is None else rows.positions
        self._sizes = [(group, a.kv_size(kind)[1]) for kind, group in enumerate(attention.groups)]
        if expanded:
            assert a.latent is not None
            self._sizes = [(1, a.latent.query_dims)] * len(self._sizes)
        self._tiles: dict[tuple[int, int], Tensor] = {}
        if chunks is not None:
            self._tiles = {size: self._tiles_of(chunks, *size) for size in set(self._sizes)}

    def read(self, kind: int, table: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return page tables [sequences, M], positions of rows [B], and the tiles of chunks if there are any."""
        return self._pages[table], self._positions, self._tiles.get(self._sizes[kind])

    def _tiles_of(self, chunks: Chunks, group: int, head_dim: int) -> Tensor:
        kernels = self._attention.kernels
        dtype = self._attention.cache.keys.dtype
        assert kernels is not None
        if self._latent is None:
            tokens = kernels.tokens_at_once(group, head_dim, dtype)
        else:
            tokens = kernels.latent_tokens_at_once(dtype)
        tiles = kernels.chunk_tiles(len(self._positions), chunks.starts, chunks.lengths, tokens=tokens)
        return to_device(tiles, chunks.pages.device, torch.int32)

    def __call__(self, kind: int, table: int, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Return [T, A, D] for queries [T, A, D], over keys and values in pages [P, BLOCK_TOKENS, K, D]."""
        attention = self._attention
        attention_kind = attention.architecture.kinds[kind]
        pages, positions, tiles = self.read(kind, table)
        assert attention.kernels is not None
        mixed: Tensor = attention.kernels.paged_attention(
            q,
            keys,
            values,
            pages,
            positions,
            window=attention_kind.window,
            chunked=attention_kind.chunked,
            bias=attention.alibi,
            sinks=sinks,
            **attention.scores_of(kind),
            **({} if tiles is None else {"tiles": tiles}),
        )
        return mixed


class ChunkAttention:
    """Attention of chunks in torch: one call for all chunks with the same start, length and spans."""

    def __init__(self, attention: Attention, chunks: Chunks) -> None:
        self._attention = attention
        self._chunks = chunks
        alike: dict[tuple[int, int, tuple[tuple[int, int], ...]], list[int]] = {}
        images = chunks.spans or [()] * len(chunks.starts)
        for index, chunk in enumerate(zip(chunks.starts, chunks.lengths, images, strict=True)):
            alike.setdefault(chunk, []).append(index)
        device = attention.cache.keys.device
        offsets = [*accumulate(chunks.lengths, initial=0)]
        self._spans = []
        for (start, length, spans), members in alike.items():
            tokens = to_device([[offsets[i] + place for place in range(length)] for i in members], device)
            blocks = blocks_of(start + length)
            pages = chunks.pages[:, to_device(members, device), :blocks].long()
            kinds = range(len(attention.architecture.kinds))
            biases = [self._bias(kind, start, start + length, spans) for kind in kinds]
            self._spans.append((start + length, tokens, pages, biases))

    def _bias(self, kind: int, start: int, end: int, spans: Sequence[tuple[int, int]]) -> Tensor | None:
        """Return the bias of scores [1, A or 1, L, S]; None if a causal mask is enough."""
        attention = self._attention
        a = attention.architecture
        window = a.kinds[kind].window
        # attention by matrix products has no causal mask
        by_products = a.attention_softcap is not None or a.sinks or attention.alibi is not None
        if not by_products and not spans and start == 0 and (window is None or window >= end):
            return None
        queries = torch.arange(start, end, device=attention.cache.keys.device)
        return attention.bias(kind, queries, end, spans).transpose(0, 1)[None]

    def __call__(self, kind: int, table: int, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Return [T, A, D] for queries [T, A, D], over keys and values in pages [P, BLOCK_TOKENS, K, D]."""
        mixed = torch.empty_like(q)
        for end, tokens, pages, biases in self._spans:
            k, v = (store[pages[table]].flatten(1, 2)[:, :end].transpose(1, 2) for store in (keys, values))
            queries = q[tokens].transpose(1, 2)
            bias = biases[kind]
            scores = self._attention.scores_of(kind)
            out = attend(queries, k, v, bias=bias, sinks=sinks, causal=bias is None, **scores)
            mixed[tokens] = out.transpose(1, 2)
        return mixed


class ExpandedChunks:
    """Chunks of latent attention in the plain form, whose keys and values are expanded together.

    The expanded keys and values are stored in separate pages, which attention reads like those of a cache.
    """

    def __init__(self, attention: Attention, chunks: Chunks, tokens: slice | Tensor, *, most_pages: int) -> None:
        """Args: shared data, the chunks, their tokens, and the number of pages for which all heads are expanded at
        once."""
        self.tokens = tokens
        """Indices of their tokens in the step."""
        device = chunks.pages.device
        counts = [blocks_of(start + length) for start, length in zip(chunks.starts, chunks.lengths, strict=True)]
        members = [[sequence, block] for sequence, count in enumerate(counts) for block in range(count)]
        sequences, blocks = to_device(members, device).unbind(1)
        self.pages = chunks.pages[:, sequences, blocks].long()
        """[page tables, P'] cache pages of their sequences."""
        firsts = torch.tensor([0, *accumulate(counts[:-1])])
        numbers = to_device(firsts[None, :, None] + torch.arange(max(counts)), device, torch.int32)
        expanded = Chunks(numbers, chunks.starts, chunks.lengths)
        self.attend: _Part
        """Attention to keys and values in pages [P', BLOCK_TOKENS, heads, D], with one page table."""
        if attention.fused is None:
            self.attend = ChunkAttention(attention, expanded)
        else:
            self.attend = PagedKernel(attention, None, expanded, expanded=True)
        self.heads_at_once = [max(1, group * most_pages // len(members)) for group in attention.groups]
        """Number of heads whose keys and values are expanded at once, for each kind of attention."""


def _by_form(
    attention: Attention, latent: Latent, batch: int, chunks: Chunks
) -> tuple[list[ExpandedChunks], slice | Tensor | None, Chunks | None]:
    """Divide latent attention into its two forms.

    Keys and values are expanded for at most as many tokens at once as the chunks have new ones, or for
    `_EXPANDED_TOKENS` if that is more, so that cached prefixes need no more memory than a prefill without them. For a
    longer sequence, heads are expanded in several passes.

    Returns:
        Chunks in the plain form; tokens in the absorbed form, those of rows first; chunks in the absorbed form.
    """
    spans = list(zip(chunks.starts, chunks.lengths, strict=True))
    tokens = [range(*ends) for ends in pairwise(accumulate(chunks.lengths, initial=batch))]
    plain = [i for i, span in enumerate(spans) if latent.expands(*span)]
    most_pages = max(blocks_of(_EXPANDED_TOKENS), sum(blocks_of(chunks.lengths[i]) for i in plain))
    groups = list[list[int]]()
    room = 0
    for i in plain:
        pages = blocks_of(sum(spans[i]))
        if not groups or pages > room:
            groups.append([])
            room = most_pages
        groups[-1].append(i)
        room -= pages
    expanded = [
        ExpandedChunks(
            attention,
            chunks.some(group),
            _joined([tokens[i] for i in group], chunks.pages.device),
            most_pages=most_pages,
        )
        for group in groups
    ]
    remaining = [i for i, span in enumerate(spans) if not latent.expands(*span)]
    absorbed = [span for span in (range(batch), *(tokens[i] for i in remaining)) if span]
    if not absorbed:
        return expanded, None, None
    return expanded, _joined(absorbed, chunks.pages.device), chunks.some(remaining) if remaining else None


def _joined(tokens: Sequence[range], device: torch.device) -> slice | Tensor:
    """Concatenate ranges of tokens into one index: a slice if they are adjacent, else a tensor."""
    if all(before.stop == after.start for before, after in pairwise(tokens)):
        return slice(tokens[0].start, tokens[-1].stop)
    return to_device([token for span in tokens for token in span], device, torch.long)


def _places(pages: Tensor, sequences: Tensor, positions: Tensor) -> Tensor:
    """Return the indices [page tables, T] of the tokens at positions [T] of sequences [T] in a cache [P *
    BLOCK_TOKENS]."""
    token_pages = pages[:, sequences, positions // BLOCK_TOKENS]
    return token_pages.long() * BLOCK_TOKENS + positions % BLOCK_TOKENS


def _chunk_places(chunks: Chunks) -> Tensor:
    """Return the indices [page tables, T] of the tokens of chunks in a cache."""
    device = chunks.pages.device
    total = sum(chunks.lengths)
    counts = to_device(chunks.lengths, device)
    index = torch.arange(len(counts), device=device).repeat_interleave(counts, output_size=total)
    shift = to_device(chunks.starts, device) - (counts.cumsum(0) - counts)
    positions = torch.arange(total, device=device) + shift[index]
    return _places(chunks.pages, index, positions)
