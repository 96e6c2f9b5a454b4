"""Triton kernels of a decoding step on a GPU, for operations that take torch several passes over memory.

One kernel applies rotary positions and writes to the KV cache. Attention of one token over the pages of its row reads
page tables and positions on the device and splits long rows over programs (flash decoding: the parts are combined by
their maxima and sums, arXiv 2205.14135, section 3.1). Residual addition and the following norm are one kernel, and so
are activation and product of a gated MLP. Each kernel has a reference in torch (attention.py, layers.py), which the
tests compare it with. All arithmetic is float32; the references round intermediate results to the dtype of the model.

Shapes: T tokens, B rows, A heads and K KV heads of this rank, G = A / K, D head size, P pages of N tokens, M pages of
the longest row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rlhf.generation.weights.description import Activation

_MOST_KEYS = 64
"""Most keys in one tile of the attention kernel."""
_TILE_BYTES = 16 * 2**10
"""Largest tile of keys. Triton keeps about four in shared memory, which is 99 KiB on sm_86 and 227 KiB on sm_90."""
_PROGRAMS = 256
"""Programs that fill a large GPU; with fewer rows, each row is split."""
_MOST_SPLITS = 32
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


@triton.jit
def _rotate_and_write_kernel(
    qkv,
    cos,
    sin,
    places,
    queries,
    keys,
    values,
    kv_heads,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One head of one token: queries to [T, A, D], keys and values to the cache [P, N, K, D] of a layer."""
    row, head = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, D_PAD)
    inside = place < D
    source = qkv + (row * (HEADS + 2 * kv_heads) + head) * D
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    if WIDTH > 0:
        if head < HEADS + kv_heads:
            turned = place < WIDTH
            other = tl.load(source + (place + WIDTH // 2) % WIDTH, mask=turned, other=0.0).to(tl.float32)
            c = tl.load(cos + row * WIDTH + place, mask=turned, other=1.0).to(tl.float32)
            s = tl.load(sin + row * WIDTH + place, mask=turned, other=0.0).to(tl.float32)
            x = x * c + other * s
    if head < HEADS:
        tl.store(queries + (row * HEADS + head) * D + place, x, mask=inside)
    else:
        kv_head = (head - HEADS) % kv_heads
        target = (tl.load(places + row) * kv_heads + kv_head) * D
        if head < HEADS + kv_heads:
            tl.store(keys + target + place, x, mask=inside)
        else:
            tl.store(values + target + place, x, mask=inside)


@triton.jit
def _adjusted(scores, cap, bias, inside, CAP: tl.constexpr, BIAS: tl.constexpr):
    """Scores with a soft cap and a bias, if there are any."""
    if CAP:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
    if BIAS:
        scores += tl.load(bias, mask=inside, other=0.0)
    return scores


@triton.jit
def _decode_attention_kernel(
    queries,
    keys,
    values,
    pages,
    positions,
    bias,
    sinks,
    out,
    tops,
    sums,
    scale,
    cap,
    window,
    kv_heads,
    row_pages,
    bias_keys,
    N: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    CAP: tl.constexpr,
    BIAS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One part of the keys of one KV head of one row, for all its queries."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + row).to(tl.int32) + 1
    first = tl.maximum(length - window, 0) if WINDOW else 0
    span = tl.cdiv(tl.cdiv(length - first, SPLITS), KEYS) * KEYS
    start = first + split * span
    end = tl.minimum(start + span, length)
    query, place = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    head = (row * kv_heads + kv_head) * G + query
    here = (query < G)[:, None] & (place < D)[None, :]
    q = tl.load(queries + head[:, None] * D + place[None, :], mask=here, other=0.0)
    top = tl.full([G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    if SINKS:
        if split == 0:  # a key without a value
            top = tl.load(sinks + kv_head * G + query, mask=query < G, other=0.0).to(tl.float32)
            total += 1.0
    mixed = tl.zeros([G_PAD, D_PAD], tl.float32)
    for block in range(start, end, KEYS):
        key = block + tl.arange(0, KEYS)
        page = tl.load(pages + row * row_pages + key // N, mask=key < end, other=0).to(tl.int64)
        base = ((page * N + key % N) * kv_heads + kv_head) * D
        seen = (key < end)[:, None] & (place < D)[None, :]
        k = tl.load(keys + base[:, None] + place[None, :], mask=seen, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        own = bias + (kv_head * G + query)[:, None] * bias_keys + key[None, :]
        scores = _adjusted(scores, cap, own, (query < G)[:, None] & (key < end)[None, :], CAP, BIAS)
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(top - higher)
        v = tl.load(values + base[:, None] + place[None, :], mask=seen, other=0.0)
        mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * faded + tl.sum(weights, 1)
        top = higher
    if SPLITS == 1:
        tl.store(out + head[:, None] * D + place[None, :], mixed / total[:, None], mask=here)
    else:
        part = head * SPLITS + split
        tl.store(out + part[:, None] * D + place[None, :], mixed, mask=here)
        tl.store(tops + part, top, mask=query < G)
        tl.store(sums + part, total, mask=query < G)


@triton.jit
def _combine_kernel(parts, tops, sums, out, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr):
    """Combine the parts of one head of one row; a part without keys has the maximum -inf and weight 0."""
    head = tl.program_id(0)
    split, place = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    top = tl.load(tops + head * SPLITS + split)
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(sums + head * SPLITS + split), 0)
    where = (head * SPLITS + split)[:, None] * D + place[None, :]
    part = tl.load(parts + where, mask=(place < D)[None, :], other=0.0)
    tl.store(out + head * D + place, tl.sum(part * weight[:, None], 0) / total, mask=place < D)


@triton.jit
def _add_rms_norm_kernel(
    x, delta, weight, added, normed, eps, WIDTH: tl.constexpr, PAD: tl.constexpr, IN_FLOAT32: tl.constexpr
):
    """A row of x + delta, and its RMS norm."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    inside = place < WIDTH
    dtype = x.dtype.element_ty
    both = tl.load(x + row * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    both += tl.load(delta + row * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    both = both.to(dtype)
    tl.store(added + row * WIDTH + place, both, mask=inside)
    both = both.to(tl.float32)
    both = both / tl.sqrt(tl.sum(both * both, 0) / WIDTH + eps)
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if not IN_FLOAT32:
        both = both.to(dtype).to(tl.float32)
    tl.store(normed + row * WIDTH + place, both * w, mask=inside)


@triton.jit
def _gated_kernel(gate_up, out, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """One block of a row of activation(gate) * up."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    g = tl.load(gate_up + row * 2 * width + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + place, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        g = g * tl.sigmoid(g)
    elif ACTIVATION == 1:
        g = g * 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
    elif ACTIVATION == 2:
        g = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    else:
        g = tl.maximum(g, 0.0)
        if ACTIVATION == 4:
            g = g * g
    tl.store(out + row * width + place, g * up, mask=inside)


def rotate_and_write(
    qkv: Tensor, table: tuple[Tensor, Tensor] | None, places: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache.

    Args:
        qkv: [T, A + 2 K, D].
        table: cosines and signed sines [T, 1, R] of the first R dimensions; none: no rotation.
        places: [T] int64, where each token lies in P * N tokens.
        keys: [P, N, K, D] of a layer.
        values: as keys.

    Returns:
        queries [T, A, D].
    """
    tokens, all_heads, d = qkv.shape
    kv_heads = keys.shape[2]
    heads = all_heads - 2 * kv_heads
    queries = qkv.new_empty(tokens, heads, d)
    cos, sin = (qkv, qkv) if table is None else table
    _rotate_and_write_kernel[tokens, all_heads](
        qkv,
        cos,
        sin,
        places,
        queries,
        keys,
        values,
        kv_heads,
        HEADS=heads,
        D=d,
        D_PAD=triton.next_power_of_2(d),
        WIDTH=0 if table is None else cos.shape[-1],
        num_warps=1,
    )
    return queries


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [B, A, D] of one token per row over the pages of the row.

    Args:
        queries: [B, A, D].
        keys: [P, N, K, D] of a layer, the new ones among them.
        values: as keys.
        pages: [B, M] int32; keys i * N to i * N + N - 1 of row b lie in page pages[b, i].
        positions: [B] of the new tokens; keys up to and including them are attended to.
        scale: scores are multiplied by it.
        window: tokens that a query attends to, itself included; none: all. Pages before it may be any.
        softcap: scores s become cap tanh(s / cap); none: no cap.
        bias: [A, S] float32, added to the scores of each head by the position of the key; none: no bias.
        sinks: [A], the score of a key without a value for each head; none: there is none.
    """
    batch, heads, d = queries.shape
    page_tokens, kv_heads = keys.shape[1:3]
    group, d_pad = heads // kv_heads, max(16, triton.next_power_of_2(d))
    splits, block = _splits(batch * kv_heads, pages.shape[1] * page_tokens), keys_at_once(d_pad, keys.dtype)
    mixed = torch.empty_like(queries)
    parts = mixed if splits == 1 else queries.new_empty(batch, heads, splits, d, dtype=torch.float32)
    tops, sums = queries.new_empty(2, batch, heads, splits, dtype=torch.float32)
    _decode_attention_kernel[batch, kv_heads, splits](
        queries,
        keys,
        values,
        pages,
        positions,
        tops if bias is None else bias,
        tops if sinks is None else sinks,
        parts,
        tops,
        sums,
        scale,
        softcap or 1.0,
        window or 0,
        kv_heads,
        pages.stride(0),
        0 if bias is None else bias.shape[1],
        N=page_tokens,
        G=group,
        G_PAD=max(16, triton.next_power_of_2(group)),
        D=d,
        D_PAD=d_pad,
        KEYS=block,
        SPLITS=splits,
        CAP=softcap is not None,
        BIAS=bias is not None,
        WINDOW=window is not None,
        SINKS=sinks is not None,
    )
    if splits > 1:
        _combine_kernel[(batch * heads,)](parts, tops, sums, mixed, D=d, D_PAD=d_pad, SPLITS=splits)
    return mixed


def keys_at_once(padded_head_dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile: as many as fit in it, a power of two from 16 (the minimum of tl.dot) to 64."""
    return max(16, min(_MOST_KEYS, _TILE_BYTES // (padded_head_dim * dtype.itemsize)))


def _splits(programs: int, capacity: int) -> int:
    """Parts of a row: as many as fill the GPU, none shorter than two tiles of a full row; a power of two."""
    useful = min(_PROGRAMS // programs, capacity // (2 * _MOST_KEYS), _MOST_SPLITS)
    return 1 if useful < 2 else 1 << (useful.bit_length() - 1)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMS norm; all [T, H], weight [H]. `in_float32`: apply the weight before rounding."""
    added, normed = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    pad = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(len(x),)](
        x,
        delta,
        weight,
        added,
        normed,
        eps,
        WIDTH=width,
        PAD=pad,
        IN_FLOAT32=in_float32,
        num_warps=min(16, max(1, pad // 512)),
    )
    return added, normed


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up [T, M] of [T, 2 M]."""
    tokens, width = len(gate_up), gate_up.shape[-1] // 2
    out = gate_up.new_empty(tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    _gated_kernel[tokens, triton.cdiv(width, block)](
        gate_up, out, width, ACTIVATION=_ACTIVATIONS[activation], BLOCK=block
    )
    return out
