"""Latent attention (DeepSeek) of a step on a GPU: norms with the write to the cache, attention to latents, and values.

Attention is as in attention.py, with these differences. All heads share one key, so a program has the queries of some
heads. A key is loaded in two parts, rotated dimensions and latent, each padded separately. The latent is also the
value, so it is loaded once. Queries are rotated when they are loaded. The reference is model/latent.py, with
`RowAttention` and `ChunkAttention` (model/attention.py).

Shapes: T tokens, B rows, A heads of this rank, Q latent of queries, R rotated dimensions, U other dimensions of a
query, L latent, V dimensions of a value, P pages of N tokens, M pages of the longest sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.functional.triton_language import tl, triton
from hybrid_rlhf.generation.ops.attention import combine, part_of_step, splits_of, weigh
from hybrid_rlhf.generation.ops.norms import normed_at
from hybrid_rlhf.generation.ops.rows import rotated_head

_HEADS = 16
"""Number of heads per program: the minimum of tl.dot."""
_TILE_BYTES = 18 * 2**10
"""Bytes of latents and rotated keys that are loaded at once."""


@triton.jit
def _rotated(source, cos, sin, place, R: tl.constexpr, WIDTH: tl.constexpr):
    """Load R dimensions of a head, or of each head in a column, and rotate the first WIDTH."""
    x = tl.load(source + place, mask=place < R, other=0.0).to(tl.float32)
    if WIDTH > 0:
        x = rotated_head(x, source, cos, sin, place, WIDTH)
    return x


@triton.jit
def _write_latents_kernel(
    down,
    q_weight,
    weight,
    cos,
    sin,
    places,
    hidden,
    keys,
    eps,
    stride,
    Q: tl.constexpr,
    Q_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    L: tl.constexpr,
    L_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """For one token: write its rotated key and normed latent to the cache, or the normed latent of its queries."""
    row = tl.program_id(0).to(tl.int64)
    down += row * (Q + L + R)
    if tl.program_id(1) == 0:
        rotated = tl.arange(0, R_PAD)
        latent = tl.arange(0, L_PAD)
        target = keys + tl.load(places + row) * stride
        key = _rotated(down + Q + L, cos + row * WIDTH, sin + row * WIDTH, rotated, R, WIDTH)
        tl.store(target + rotated, key, mask=rotated < R)
        tl.store(target + R + latent, normed_at(down + Q, weight, latent, eps, L, IN_FLOAT32), mask=latent < L)
    elif Q > 0:
        place = tl.arange(0, Q_PAD)
        tl.store(hidden + row * Q + place, normed_at(down, q_weight, place, eps, Q, IN_FLOAT32), mask=place < Q)


@triton.jit
def _latent_kernel(
    queries,
    absorbed,
    cos,
    sin,
    keys,
    pages,
    positions,
    tiles,
    out,
    parts,
    tops,
    sums,
    scale,
    rows,
    heads,
    stride,
    row_pages,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    L: tl.constexpr,
    L_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
):
    """Compute one part of a row, or one tile of a chunk, for some heads."""
    program = tl.program_id(0)
    query = tl.arange(0, QUERIES)
    first, sequence, position, count, split, start, end = part_of_step(
        program, positions, tiles, rows, 0, KEYS, SPLITS, SPAN, TILES, 0
    )
    head = tl.program_id(1) * HEADS + query % HEADS
    token = query // HEADS
    real = (token < count) & (head < heads)
    head = tl.minimum(head, heads - 1)
    token = tl.minimum(token, count - 1)  # padding repeats the last one
    at = position + token
    token = (first + token).to(tl.int64)
    row = token * heads + head
    rotated = tl.arange(0, R_PAD)
    latent = tl.arange(0, L_PAD)
    turned = (queries + row * (U + R) + U)[:, None]
    cos, sin = (cos + token * WIDTH)[:, None], (sin + token * WIDTH)[:, None]
    q_rotated = _rotated(turned, cos, sin, rotated[None, :], R, WIDTH).to(queries.dtype.element_ty)
    place = row[:, None] * L + latent[None, :]
    inside = (latent < L)[None, :]
    q_latent = tl.load(absorbed + place, mask=inside, other=0.0)
    pages += sequence * row_pages
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, L_PAD], tl.float32)
    for block in range(start, end, KEYS):
        key = block + tl.arange(0, KEYS)
        page = tl.load(pages + key // N, mask=key < end, other=0).to(tl.int64)
        where = keys + ((page * N + key % N) * stride)[:, None]
        k = tl.load(where + rotated[None, :], mask=(key < end)[:, None] & (rotated < R)[None, :], other=0.0)
        v = tl.load(where + R + latent[None, :], mask=(key < end)[:, None] & inside, other=0.0)
        scores = tl.dot(q_rotated, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(v), scores, input_precision="ieee") * scale
        scores = tl.where((key[None, :] <= at[:, None]) & (key < end)[None, :], scores, float("-inf"))
        weights, faded, top = weigh(scores, top)
        mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * faded + tl.sum(weights, 1)
    inside &= real[:, None]
    if SPLITS == 1 or (TILES and program >= rows * SPLITS):
        tl.store(out + place, mixed / total[:, None], mask=inside)
    else:
        part = row * SPLITS + split
        tl.store(tops + part, top, mask=real)
        tl.store(sums + part, total, mask=real)
        tl.store(parts + part[:, None] * L + latent[None, :], mixed, mask=inside & (start < end))


def write_latents(
    down: Tensor,
    q_weight: Tensor | None,
    weight: Tensor,
    table: tuple[Tensor, Tensor] | None,
    places: Tensor,
    keys: Tensor,
    *,
    eps: float,
    in_float32: bool,
) -> Tensor:
    """Norm latents, rotate keys, and write both to the cache.

    Args:
        down: latents of queries, latents, and keys [T, Q + L + R].
        q_weight: [Q] weight of the norm of query latents; none: Q = 0.
        weight: [L] weight of the norm of latents.
        table: cosines and signed sines [T, 1, r] of the first r <= R dimensions; none: no rotation.
        places: [T] int64, index of each token in P * N.
        keys: [P, N, 1, R + L] of a layer.
        eps: epsilon of the norms.
        in_float32: apply weights before rounding.

    Returns:
        normed latents of queries [T, Q].
    """
    latent = len(weight)
    hidden_size = 0 if q_weight is None else len(q_weight)
    rotated = down.shape[1] - hidden_size - latent
    hidden = down.new_empty(len(down), hidden_size)
    cos, sin = table or (weight, weight)
    _write_latents_kernel[len(down), 1 if q_weight is None else 2](
        *(down.contiguous(), weight if q_weight is None else q_weight, weight, cos, sin, places, hidden, keys),
        *(eps, keys.stride(1)),
        Q=hidden_size,
        Q_PAD=triton.next_power_of_2(max(1, hidden_size)),
        R=rotated,
        R_PAD=triton.next_power_of_2(rotated),
        L=latent,
        L_PAD=triton.next_power_of_2(latent),
        WIDTH=0 if table is None else cos.shape[-1],
        IN_FLOAT32=in_float32,
    )
    return hidden


def latent_attention(
    queries: Tensor,
    absorbed: Tensor,
    value_up: Tensor,
    table: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    pages: Tensor,
    positions: Tensor,
    tiles: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """Return values [T, A, V] of attention to latents, for one token per row, then for the tokens of chunks.

    Args:
        queries: [T, A, U + R], first those of the B rows; the last R dimensions are not rotated yet.
        absorbed: [T, A, L], queries multiplied by the key weights, for products with latents.
        value_up: [A, V, L], weights from latents to the values of each head; those of a head are contiguous.
        table: cosines and signed sines [T, 1, r] of the first r <= R dimensions; none: no rotation.
        keys: [P, N, 1, R + L] of a layer, including the new ones.
        pages: [sequences, M] int32, as in `paged_attention`.
        positions: [B] positions of the rows' new tokens.
        tiles: tiles of the chunks, from `chunk_tiles` with `latent_tokens_at_once`; none: there are only rows.
        scale: factor of the scores.
    """
    tokens, heads, latent = absorbed.shape
    rows = len(positions)
    rotated = keys.shape[3] - latent
    blocks = triton.cdiv(heads, _HEADS)
    splits, span = splits_of(rows * blocks, pages.shape[1] * keys.shape[1]) if rows else (1, 0)
    mixed = torch.empty_like(absorbed)
    values = absorbed.new_empty(tokens, heads, value_up.shape[1])
    parts = mixed if splits == 1 else mixed.new_empty(rows, heads, splits, latent, dtype=torch.float32)
    tops, sums = mixed.new_empty(2, rows, heads, splits, dtype=torch.float32)
    cos, sin = table or (queries, queries)
    inputs = (queries, absorbed, cos, sin, keys, pages, positions, positions if tiles is None else tiles)
    _latent_kernel[rows * splits + (0 if tiles is None else len(tiles)), blocks](
        *(*inputs, mixed, parts, tops, sums, scale, rows, heads, keys.stride(1), pages.stride(0)),
        N=keys.shape[1],
        U=queries.shape[2] - rotated,
        R=rotated,
        L=latent,
        WIDTH=0 if table is None else cos.shape[-1],
        SPLITS=splits,
        SPAN=span,
        **latent_tile(rotated, latent, keys.dtype, tiles=tiles is not None),
    )
    if splits > 1:
        combine(parts, tops, sums, mixed)
    torch.bmm(mixed.transpose(0, 1), value_up.transpose(1, 2), out=values.transpose(0, 1))
    return values


def latent_tokens_at_once(dtype: torch.dtype) -> int:
    """Number of tokens per tile of a chunk, so that latents fit in the shared memory of sm_86."""
    return 4 // dtype.itemsize


def latent_tile(rotated_dims: int, latent: int, dtype: torch.dtype, *, tiles: bool) -> dict[str, int | bool]:
    """Return compile-time constants of `_latent_kernel`."""
    r_pad = padded(rotated_dims)
    l_pad = padded(latent)
    fitting = _TILE_BYTES // ((r_pad + l_pad) * dtype.itemsize)
    return {
        "HEADS": _HEADS,
        "QUERIES": _HEADS * (latent_tokens_at_once(dtype) if tiles else 1),
        "R_PAD": r_pad,
        "L_PAD": l_pad,
        "KEYS": min(64, max(16, 1 << max(0, fitting.bit_length() - 1))),
        "TILES": tiles,
        "num_warps": 8 if tiles else 4,
    }


def padded(size: int) -> int:
    """Return the next power of two that tl.dot supports."""
    return max(16, triton.next_power_of_2(size))
