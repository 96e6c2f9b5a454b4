"""Latent attention (DeepSeek) of a step on a GPU: rotation and norm of what goes into it, and attention over latents.

Attention is as in attention.py, with these differences: all heads share one key, so a program has the queries of some
heads; a key is loaded in two parts, rotated dimensions and latent, neither of which is padded to the sum; and the
latent is the value too, so it is loaded once. The references are `RowAttention` and `ChunkAttention`
(model/attention.py), and those in model/latent.py.

Shapes: T tokens, B rows, A heads of this rank, R rotated dimensions, L latent, U other dimensions of a query, P pages
of N tokens, M pages of the longest sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rlhf.generation.model.kernels.attention import combine, part_of_step, splits_of, weigh
from hybrid_rlhf.generation.model.kernels.norms import rms_normed
from hybrid_rlhf.generation.model.kernels.rows import rotated_head

_HEADS = 16
"""Of a program; the minimum of tl.dot."""
_TILE_BYTES = 18 * 2**10
"""Of latents and rotated keys that are loaded at once."""


@triton.jit
def _mix_latents(
    q_rotated,
    q_latent,
    at,
    keys,
    pages,
    start,
    end,
    scale,
    stride,
    N: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Latents of keys start to end - 1 by their weights, the highest score, and the sum of weights."""
    rotated, latent = tl.arange(0, q_rotated.shape[1]), tl.arange(0, q_latent.shape[1])
    top = tl.full([q_latent.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q_latent.shape[0]], tl.float32)
    mixed = tl.zeros([q_latent.shape[0], q_latent.shape[1]], tl.float32)
    for block in range(start, end, KEYS):
        key = block + tl.arange(0, KEYS)
        page = tl.load(pages + key // N, mask=key < end, other=0).to(tl.int64)
        where, real = keys + ((page * N + key % N) * stride)[:, None], (key < end)[:, None]
        k = tl.load(where + rotated[None, :], mask=real & (rotated < R)[None, :], other=0.0)
        v = tl.load(where + R + latent[None, :], mask=real & (latent < L)[None, :], other=0.0)
        scores = tl.dot(q_rotated, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(v), scores, input_precision="ieee") * scale
        scores = tl.where((key[None, :] <= at[:, None]) & (key < end)[None, :], scores, float("-inf"))
        weights, faded, top = weigh(scores, top)
        mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * faded + tl.sum(weights, 1)
    return mixed, top, total


@triton.jit
def _latent_kernel(
    queries,
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
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    L: tl.constexpr,
    L_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
):
    """One part of a row, or one tile of a chunk, for some heads."""
    program, query = tl.program_id(0), tl.arange(0, QUERIES)
    token, sequence, position, count, split, start, end = part_of_step(
        program, positions, tiles, rows, 0, KEYS, SPLITS, SPAN, TILES, 0
    )
    head = tl.program_id(1) * HEADS + query % HEADS
    real, at = (query // HEADS < count) & (head < heads), position + tl.minimum(query // HEADS, count - 1)
    row = (token + query // HEADS).to(tl.int64) * heads + head
    rotated, latent = tl.arange(0, R_PAD), tl.arange(0, L_PAD)
    given, here = queries + row[:, None] * (R + L), real[:, None] & (latent < L)[None, :]
    q_rotated = tl.load(given + rotated[None, :], mask=real[:, None] & (rotated < R)[None, :], other=0.0)
    q_latent = tl.load(given + R + latent[None, :], mask=here, other=0.0)
    pages += sequence * row_pages
    mixed, top, total = _mix_latents(q_rotated, q_latent, at, keys, pages, start, end, scale, stride, N, R, L, KEYS)
    if SPLITS == 1 or (TILES and program >= rows * SPLITS):
        tl.store(out + row[:, None] * L + latent[None, :], mixed / total[:, None], mask=here)
    else:
        part = row * SPLITS + split
        tl.store(tops + part, top, mask=real)
        tl.store(sums + part, total, mask=real)
        tl.store(parts + part[:, None] * L + latent[None, :], mixed, mask=here & (start < end))


@triton.jit
def _rotated(given, cos, sin, R: tl.constexpr, R_PAD: tl.constexpr, WIDTH: tl.constexpr):
    """R dimensions, the first WIDTH rotated."""
    place = tl.arange(0, R_PAD)
    x = tl.load(given + place, mask=place < R, other=0.0).to(tl.float32)
    if WIDTH > 0:
        x = rotated_head(x, given, cos, sin, place, WIDTH)
    return x


@triton.jit
def _latent_inputs_kernel(
    queries,
    down,
    weight,
    cos,
    sin,
    out,
    eps,
    heads,
    plain_dims,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    L: tl.constexpr,
    L_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """The rotated part of a head of a token; or of its key, with the normed latent, as key and as value."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rotated, latent = tl.arange(0, R_PAD), tl.arange(0, L_PAD)
    cos, sin, target = cos + row * WIDTH, sin + row * WIDTH, out + (row * (heads + 2) + head) * (R + L)
    if head < heads:
        given = queries + (row * heads + head) * (plain_dims + R) + plain_dims
        tl.store(target + rotated, _rotated(given, cos, sin, R, R_PAD, WIDTH), mask=rotated < R)
    else:
        given = down + row * (L + R)
        key = _rotated(given + L, cos, sin, R, R_PAD, WIDTH)
        x = tl.load(given + latent, mask=latent < L, other=0.0).to(tl.float32)
        normed_latent = rms_normed(x, weight, latent, latent < L, eps, down.dtype.element_ty, L, IN_FLOAT32)
        for copy in tl.static_range(2):
            tl.store(target + copy * (R + L) + rotated, key, mask=rotated < R)
            tl.store(target + copy * (R + L) + R + latent, normed_latent, mask=latent < L)


def latent_inputs(
    queries: Tensor,
    down: Tensor,
    weight: Tensor,
    table: tuple[Tensor, Tensor] | None,
    eps: float,
    *,
    in_float32: bool,
) -> Tensor:
    """What goes into latent attention, [T, A + 2, R + L]: queries without what is absorbed, then the key twice.

    Args:
        queries: [T, A, U + R].
        down: latents and keys [T, L + R].
        weight: [L] of the norm of latents.
        table: cosines and signed sines [T, 1, .] of the first of R dimensions; none: no rotation.
        eps: of the norm.
        in_float32: apply the weight before rounding.

    Returns:
        the latent part of queries, [:, :A, R:], is not set.
    """
    tokens, heads, query = queries.shape
    latent, rotated = len(weight), down.shape[1] - len(weight)
    out, (cos, sin) = queries.new_empty(tokens, heads + 2, rotated + latent), table or (weight, weight)
    _latent_inputs_kernel[tokens, heads + 1](
        *(queries.contiguous(), down.contiguous(), weight, cos, sin, out, eps, heads, query - rotated),
        R=rotated,
        R_PAD=triton.next_power_of_2(rotated),
        L=latent,
        L_PAD=triton.next_power_of_2(latent),
        WIDTH=0 if table is None else cos.shape[-1],
        IN_FLOAT32=in_float32,
    )
    return out


def latent_attention(
    queries: Tensor,
    keys: Tensor,
    pages: Tensor,
    positions: Tensor,
    *,
    rotated_dims: int,
    scale: float,
    tiles: Tensor | None = None,
) -> Tensor:
    """Latents [T, A, L] that heads attend to: one token per row, and the tokens of chunks after them.

    Args:
        queries: [T, A, R + L], those of the B rows first.
        keys: [P, N, 1, R + L] of a layer, the new ones among them.
        pages: [sequences, M] int32, as in `paged_attention`.
        positions: [B] of the rows' new tokens.
        rotated_dims: R.
        scale: scores are multiplied by it.
        tiles: of the chunks, from `chunk_tiles` for `latent_tokens_at_once` each; none: there are only rows.
    """
    heads, rows, latent = queries.shape[1], len(positions), queries.shape[2] - rotated_dims
    blocks = triton.cdiv(heads, _HEADS)
    splits, span = splits_of(rows * blocks, pages.shape[1] * keys.shape[1]) if rows else (1, 0)
    mixed = queries.new_empty(len(queries), heads, latent)
    parts = mixed if splits == 1 else queries.new_empty(rows, heads, splits, latent, dtype=torch.float32)
    tops, sums = queries.new_empty(2, rows, heads, splits, dtype=torch.float32)
    _latent_kernel[rows * splits + (0 if tiles is None else len(tiles)), blocks](
        *(queries, keys, pages, positions, positions if tiles is None else tiles, mixed, parts, tops, sums),
        *(scale, rows, heads, keys.stride(1), pages.stride(0)),
        N=keys.shape[1],
        R=rotated_dims,
        L=latent,
        SPLITS=splits,
        SPAN=span,
        **latent_tile(rotated_dims, latent, keys.dtype, tiles=tiles is not None),
    )
    if splits > 1:
        combine(parts, tops, sums, mixed)
    return mixed


def latent_tokens_at_once(dtype: torch.dtype) -> int:
    """Tokens of a tile of a chunk: as many as leave room for the latents in the shared memory of sm_86."""
    return 4 // dtype.itemsize


def latent_tile(rotated_dims: int, latent: int, dtype: torch.dtype, *, tiles: bool) -> dict[str, int | bool]:
    """Sizes of what a program computes, for the compiler."""
    r_pad, l_pad = (max(16, triton.next_power_of_2(size)) for size in (rotated_dims, latent))
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
