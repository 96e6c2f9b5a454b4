"""Triton kernels of single tokens: rotary positions with the write to the KV cache, norms and gates.

Residual addition and the following norm are one kernel, and so are activation and product of a gated MLP. The
references in torch are in attention.py and layers.py. All arithmetic is float32; the references round intermediate
results to the dtype of the model.

Shapes: T tokens, A heads and K KV heads of this rank, D head size, P pages of N tokens, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rlhf.generation.weights.description import Activation

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
