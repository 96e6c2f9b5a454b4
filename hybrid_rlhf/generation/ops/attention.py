"""Attention in torch over the keys of each sequence, and in Triton over the paged KV cache on a GPU.

On a GPU, one launch computes decoding rows and chunks of prompts. A program computes a tile of queries: all queries of
one KV head, for one decoding row or for some tokens of a chunk, so that a key is read once for the group. Page tables
and positions are read on the device. A decoding row is split over programs by its length, into at most as many parts as
fit in two waves of programs (flash decoding: the parts are combined by their maxima and sums, arXiv 2205.14135, section
3.1). A short row has one part, and programs without a part return immediately. Chunks attend to all cached tokens of
their sequence, and causally to their own. The references are `attend` and `attend_rows`, over gathered pages
(model/attention.py). Arithmetic is float32; attention weights are rounded to the dtype of the values before the
product.

Shapes: T tokens, B rows, A heads and K KV heads of this rank, G = A / K, D head size, P pages of N tokens, M pages of
the longest sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.functional.triton_language import tl, triton

_MOST_KEYS = 64
"""Maximum number of keys, and of queries, per tile."""
_TILE_BYTES = 16 * 2**10
"""Maximum size of a tile of keys. Triton keeps about four in shared memory (99 KiB on sm_86, 227 KiB on sm_90)."""
PROGRAMS = 256
"""Number of programs that fill a large GPU."""
_SHORT_SPAN = 2 * _MOST_KEYS
"""Minimum number of keys per part if rows alone do not fill the GPU."""
_LONG_SPAN = 8 * _MOST_KEYS
"""Minimum number of keys per part if rows alone fill the GPU."""
_MOST_SPLITS = 32
_PROGRAMS_AT_ONCE = 2
"""Number of programs that run at once on a multiprocessor, limited by the shared memory of their tiles."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
) -> Tensor:
    """Return attention outputs [n, A, L, D] for q [n, A, L, D] over k, v [n, K, S, D].

    The bias is [n or 1, A or 1, L, S], sinks are [A].
    """
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    n, heads, length, d = q.shape
    rows = q.reshape(n * k.shape[1], -1, d)  # group the queries of each KV head
    bias = None if bias is None else bias.expand(n, heads, length, -1).reshape(len(rows), rows.shape[1], -1)
    if sinks is not None:
        sinks = sinks[None, :, None].expand(n, heads, length).reshape(len(rows), -1)
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    return attend_rows(rows, k, v, scale=scale, softcap=softcap, bias=bias, sinks=sinks).view(n, heads, length, d)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None, bias: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Return attention outputs [n, G, D] for q [n, G, D] over k, v [n, S, D], by two matrix products.

    The bias is [n, G or 1, S], sinks are [n, G].

    On a CPU this takes half the time of torch's flash attention for small G, as in decoding.
    """
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, :, None].float()], dim=-1)
    weights = scores.softmax(dim=-1)[:, :, : k.shape[1]]
    return torch.bmm(weights.to(v.dtype), v)


@triton.jit
def _first_key(position, window, WINDOW: tl.constexpr):
    """First key that a query attends to. WINDOW 0: no window; 1: it slides; 2: it begins at multiples of its size."""
    if WINDOW == 2:
        return position // window * window
    if WINDOW == 1:
        return tl.maximum(position + 1 - window, 0)
    return position * 0


@triton.jit
def part_of_step(
    program,
    positions,
    tiles,
    rows,
    window,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Work of a program, a part of a row or a tile of a chunk: first token, sequence, position of that token, number of
    tokens, index of the part, first key, and the key after the last."""
    token = program // SPLITS
    split = program % SPLITS
    sequence = token
    count = 1
    if TILES and program >= rows * SPLITS:
        split = 0
        tile = tiles + (program - rows * SPLITS) * 4
        token = tl.load(tile)
        sequence = tl.load(tile + 1)
        position = tl.load(tile + 2)
        count = tl.load(tile + 3)
        start, end = _first_key(position, window, WINDOW), position + count
    else:
        position = tl.load(positions + sequence).to(tl.int32)
        # parts have equal lengths of at least SPAN keys
        first = _first_key(position, window, WINDOW)
        span = tl.maximum(tl.cdiv(tl.cdiv(position + 1 - first, SPLITS), KEYS) * KEYS, SPAN)
        start = first + split * span
        end = tl.minimum(start + span, position + 1)
    return token, sequence, position, count, split, start, end


@triton.jit
def weigh(scores, top):
    """Online softmax: weights of scores relative to the new maximum, the factor of earlier weights, and the maximum."""
    higher = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # a query without keys so far
    return tl.exp(scores - shift[:, None]), tl.exp(top - shift), higher


@triton.jit
def _attention_kernel(
    queries,
    keys,
    values,
    pages,
    positions,
    tiles,
    bias,
    sinks,
    out,
    parts,
    tops,
    sums,
    scale,
    cap,
    window,
    rows,
    kv_heads,
    stride,
    row_pages,
    bias_keys,
    N: tl.constexpr,
    G: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
    CAP: tl.constexpr,
    BIAS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Compute one part of a row, or one tile of a chunk, for the queries of one KV head."""
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    token, sequence, position, count, split, start, end = part_of_step(
        program, positions, tiles, rows, window, KEYS, SPLITS, SPAN, TILES, WINDOW
    )
    query = tl.arange(0, QUERIES)
    place = tl.arange(0, D_PAD)
    real = query // G < count
    at = position + tl.minimum(query // G, count - 1)
    head = (token + query // G).to(tl.int64) * (kv_heads * G) + kv_head * G + query % G
    here = real[:, None] & (place < D)[None, :]
    q = tl.load(queries + head[:, None] * D + place[None, :], mask=here, other=0.0)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    if SINKS and split == 0:  # the score of a key without a value
        top = tl.load(sinks + kv_head * G + query % G).to(tl.float32)
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    keys = keys + kv_head * D
    values = values + kv_head * D
    pages = pages + sequence * row_pages
    bias += (kv_head * G + query % G) * bias_keys
    mixed = tl.zeros([QUERIES, D_PAD], tl.float32)
    for block in range(start, end, KEYS):
        key = block + tl.arange(0, KEYS)
        page = tl.load(pages + key // N, mask=key < end, other=0).to(tl.int64)
        where = ((page * N + key % N) * stride)[:, None] + place[None, :]
        inside = (key < end)[:, None] & (place < D)[None, :]
        k = tl.load(keys + where, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAP:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
        if BIAS:
            scores += tl.load(bias[:, None] + key[None, :], mask=(key < end)[None, :], other=0.0)
        seen = (key[None, :] <= at[:, None]) & (key < end)[None, :]
        if WINDOW:
            seen &= key[None, :] >= _first_key(at, window, WINDOW)[:, None]
        weights, faded, top = weigh(tl.where(seen, scores, float("-inf")), top)
        v = tl.load(values + where, mask=inside, other=0.0)
        mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * faded + tl.sum(weights, 1)
    if SPLITS == 1 or (TILES and program >= rows * SPLITS):
        tl.store(out + head[:, None] * D + place[None, :], mixed / total[:, None], mask=here)
    else:
        part = head * SPLITS + split
        tl.store(tops + part, top, mask=real)
        tl.store(sums + part, total, mask=real)
        tl.store(parts + part[:, None] * D + place[None, :], mixed, mask=here & (start < end))


@triton.jit
def _combine_kernel(parts, tops, sums, out, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr):
    """Combine the parts of one head of one row. A part without keys has no values, and the maximum -inf or a sink."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    place = tl.arange(0, D_PAD)
    top = tl.load(tops + head * SPLITS + split)
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(sums + head * SPLITS + split), 0)
    where = (head * SPLITS + split)[:, None] * D + place[None, :]
    part = tl.load(parts + where, mask=(weight > 0)[:, None] & (place < D)[None, :], other=0.0)
    tl.store(out + head * D + place, tl.sum(part * weight[:, None], 0) / total, mask=place < D)


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    tiles: Tensor | None = None,
) -> Tensor:
    """Return attention outputs [T, A, D] of one token per row, then of the tokens of chunks, over their pages.

    Args:
        queries: [T, A, D], first those of the B rows.
        keys: [P, N, K, D] of a layer, including the new ones; those of a token are contiguous.
        values: as keys.
        pages: [sequences, M] int32; keys i * N to i * N + N - 1 of sequence s are in page pages[s, i]. Row b is
            sequence b.
        positions: [B] positions of the rows' new tokens, which attend to keys up to and including their own.
        scale: factor of the scores.
        window: number of tokens that a query attends to, including itself; none: all. Pages before it are ignored.
        chunked: the window begins at the last multiple of its size, instead of sliding.
        softcap: scores s become cap tanh(s / cap); none: no cap.
        bias: [A, S] float32, added to the scores of each head, by the position of the key; none: no bias.
        sinks: [A], score of a key without a value for each head; none: no sinks.
        tiles: tiles of the chunks, from `chunk_tiles`; none: there are only rows.
    """
    heads = queries.shape[1]
    d = queries.shape[2]
    rows = len(positions)
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    d_pad = max(16, triton.next_power_of_2(d))
    splits, span = splits_of(rows * kv_heads, pages.shape[1] * keys.shape[1]) if rows else (1, 0)
    mixed = torch.empty_like(queries)
    parts = mixed if splits == 1 else queries.new_empty(rows, heads, splits, d, dtype=torch.float32)
    tops, sums = queries.new_empty(2, rows, heads, splits, dtype=torch.float32)
    inputs = (queries, keys, values, pages, positions)
    outputs = (mixed, parts, tops, sums)
    _attention_kernel[rows * splits + (0 if tiles is None else len(tiles)), kv_heads](
        *inputs,
        positions if tiles is None else tiles,
        tops if bias is None else bias,
        tops if sinks is None else sinks,
        *outputs,
        scale,
        softcap or 1.0,
        window or 0,
        rows,
        kv_heads,
        keys.stride(1),
        pages.stride(0),
        0 if bias is None else bias.shape[1],
        N=keys.shape[1],
        G=group,
        QUERIES=max(16, triton.next_power_of_2(group)) if tiles is None else queries_at_once(group, d_pad, keys.dtype),
        D=d,
        D_PAD=d_pad,
        KEYS=keys_at_once(d_pad, keys.dtype),
        SPLITS=splits,
        SPAN=span,
        TILES=tiles is not None,
        CAP=softcap is not None,
        BIAS=bias is not None,
        WINDOW=0 if window is None else 1 + chunked,
        SINKS=sinks is not None,
    )
    if splits > 1:
        combine(parts, tops, sums, mixed)
    return mixed


def combine(parts: Tensor, tops: Tensor, sums: Tensor, out: Tensor) -> None:
    """Combine the parts [B, A, splits, D] of rows by maxima and sums [B, A, splits]; writes the first B of out [T, A,
    D]."""
    rows, heads, splits, d = parts.shape
    d_pad = triton.next_power_of_2(d)
    _combine_kernel[(rows * heads,)](parts, tops, sums, out, D=d, D_PAD=d_pad, SPLITS=splits)


def chunk_tiles(
    rows: int, starts: Sequence[int], lengths: Sequence[int], *, tokens: int
) -> list[tuple[int, int, int, int]]:
    """Return the tiles of chunks as (first token, sequence, position of that token, number of tokens).

    Args:
        rows: number of rows of the step, whose tokens and sequences come first.
        starts: position of the first token of each chunk.
        lengths: number of tokens of each chunk.
        tokens: maximum number of tokens per tile.
    """
    tiles = []
    token = rows
    for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True), start=rows):
        for first in range(0, length, tokens):
            tiles.append((token + first, sequence, start + first, min(tokens, length - first)))
        token += length
    return tiles


def keys_at_once(padded_head_dim: int, dtype: torch.dtype) -> int:
    """Number of keys per tile: the power of two that fits, from 16 (the minimum of tl.dot) to 64."""
    return max(16, min(_MOST_KEYS, _TILE_BYTES // (padded_head_dim * dtype.itemsize)))


def queries_at_once(group: int, padded_head_dim: int, dtype: torch.dtype) -> int:
    """Number of queries per tile of a chunk: as keys, but at least those of one token; 64 in 16 bits up to head size
    256.

    With fewer than 64, tensor cores use their older instructions (mma.sync, not wgmma).
    """
    fewest = _MOST_KEYS if dtype.itemsize == 2 and padded_head_dim <= 256 else keys_at_once(padded_head_dim, dtype)
    return max(fewest, triton.next_power_of_2(group))


def tokens_at_once(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Number of tokens per tile of a chunk, with `group` queries per KV head and token."""
    return queries_at_once(group, max(16, triton.next_power_of_2(head_dim)), dtype) // group


def splits_of(programs: int, capacity: int) -> tuple[int, int]:
    """Return the maximum number of parts of a row, a power of two, and the minimum number of keys of a part.

    All parts of all rows and KV heads are at most two waves of programs, even for the longest rows: CUDA graphs launch
    programs for the capacity, and programs without keys also take time.
    """
    span = _SHORT_SPAN if programs < PROGRAMS else _LONG_SPAN
    waves = max(1, 2 * _PROGRAMS_AT_ONCE * _multiprocessors() // programs)
    fitting = 1 << (min(_MOST_SPLITS, waves).bit_length() - 1)
    return min(fitting, triton.next_power_of_2(triton.cdiv(capacity, span))), span


@functools.cache
def _multiprocessors() -> int:
    """Number of multiprocessors of the current GPU; without a GPU, that of an H100."""
    if not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
