"""Triton kernels of single tokens: rotary positions with the write to the KV cache, norms and gates.

Residual addition and the norms before and after it are one kernel, and so are the norms of all heads, activation and
product of a gated MLP, and norm and gate of a recurrent layer. The references in torch are in attention.py, layers.py
and recurrent/mixers.py. All arithmetic is float32; the references round intermediate results to the dtype of the model.

Shapes: T tokens, A heads and K KV heads of this rank, D head size, P pages of N tokens, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rlhf.generation.weights.description import Activation

ACTIVATION_NUMBERS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


@triton.jit
def rotated_head(x, source, cos, sin, place, WIDTH: tl.constexpr):
    """A head x at source, of which the first WIDTH dimensions are rotated."""
    turned = place < WIDTH
    other = tl.load(source + (place + WIDTH // 2) % WIDTH, mask=turned, other=0.0).to(tl.float32)
    c = tl.load(cos + place, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + place, mask=turned, other=0.0).to(tl.float32)
    return x * c + other * s


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
    stride,
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
            x = rotated_head(x, source, cos + row * WIDTH, sin + row * WIDTH, place, WIDTH)
    if head < HEADS:
        tl.store(queries + (row * HEADS + head) * D + place, x, mask=inside)
    else:
        kv_head = (head - HEADS) % kv_heads
        target = tl.load(places + row) * stride + kv_head * D
        if head < HEADS + kv_heads:
            tl.store(keys + target + place, x, mask=inside)
        else:
            tl.store(values + target + place, x, mask=inside)


@triton.jit
def rms_normed(x, weight, place, inside, eps, dtype, WIDTH: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """RMS norm of a row in float32."""
    x = x / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if not IN_FLOAT32:
        x = x.to(dtype).to(tl.float32)
    return x * w


@triton.jit
def _rms_norm_kernel(
    x,
    delta,
    delta_weight,
    weight,
    added,
    normed,
    eps,
    inner,
    outer_stride,
    inner_stride,
    out_outer_stride,
    out_inner_stride,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    ADD: tl.constexpr,
    NORM_DELTA: tl.constexpr,
    NORM_SUM: tl.constexpr,
):
    """A row of x, to which delta or its RMS norm is added, and the RMS norm of the sum."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    inside = place < WIDTH
    dtype = x.dtype.element_ty
    source = x + row // inner * outer_stride + row % inner * inner_stride
    both = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        d = tl.load(delta + row * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        if NORM_DELTA:
            d = rms_normed(d, delta_weight, place, inside, eps, dtype, WIDTH, IN_FLOAT32).to(dtype).to(tl.float32)
        both = (both + d).to(dtype)
        tl.store(added + row * WIDTH + place, both, mask=inside)
        both = both.to(tl.float32)
    if NORM_SUM:
        out = rms_normed(both, weight, place, inside, eps, dtype, WIDTH, IN_FLOAT32)
        target = normed + row // inner * out_outer_stride + row % inner * out_inner_stride
        tl.store(target + place, out, mask=inside)


@triton.jit
def _norm_heads_kernel(
    qkv,
    q_weight,
    k_weight,
    v_weight,
    eps,
    kv_heads,
    row_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """RMS norm of one head of one token, in place: of queries, of keys and of values, where they have a weight."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, D_PAD)
    inside = place < D
    dtype = qkv.dtype.element_ty
    source = qkv + row * row_stride + head * D + place
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS:
        tl.store(source, rms_normed(x, q_weight, place, inside, eps, dtype, D, IN_FLOAT32), mask=inside)
    elif head < HEADS + kv_heads:
        if KEYS:
            tl.store(source, rms_normed(x, k_weight, place, inside, eps, dtype, D, IN_FLOAT32), mask=inside)
    elif VALUES:
        tl.store(source, rms_normed(x, v_weight, place, inside, eps, dtype, D, IN_FLOAT32), mask=inside)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """An activation, by its number."""
    if ACTIVATION == 0:
        x = x * tl.sigmoid(x)
    elif ACTIVATION == 1:
        x = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x = tl.maximum(x, 0.0)
        if ACTIVATION == 4:
            x = x * x
    return x


@triton.jit
def _gated_kernel(gate_up, out, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """One block of a row of activation(gate) * up."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    g = tl.load(gate_up + row * 2 * width + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + place, mask=inside, other=0.0).to(tl.float32)
    g = activated(g, ACTIVATION)
    tl.store(out + row * width + place, g * up, mask=inside)


@triton.jit
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    eps,
    groups,
    gate_stride,
    weight_stride,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """One group of one token: its RMS norm, multiplied by the gate before or after it."""
    row, group, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PAD)
    inside = place < WIDTH
    target = (row * groups + group) * WIDTH + place
    mixed = tl.load(x + target, mask=inside, other=0.0)
    g = tl.load(gate + row * gate_stride + group * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.sigmoid(g)
    if not SIGMOID:
        factor *= g
    if GATE_FIRST:
        mixed *= factor
    if NORM:
        w = tl.load(weight + group * weight_stride + place, mask=inside, other=0.0).to(tl.float32)
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, 0) / WIDTH + eps) * w
    if not GATE_FIRST:
        mixed *= factor
    tl.store(out + target, mixed, mask=inside)


def rotate_and_write(
    qkv: Tensor, table: tuple[Tensor, Tensor] | None, places: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache.

    Args:
        qkv: [T, A + 2 K, D].
        table: cosines and signed sines [T, 1, R] of the first R dimensions; none: no rotation.
        places: [T] int64, where each token lies in P * N tokens.
        keys: [P, N, K, D] of a layer; those of a token are contiguous.
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
        keys.stride(1),
        HEADS=heads,
        D=d,
        D_PAD=triton.next_power_of_2(d),
        WIDTH=0 if table is None else cos.shape[-1],
        num_warps=1,
    )
    return queries


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> Tensor:
    """RMS norm of x [T, H] or of its heads [T, heads, H], weight [H].

    `in_float32`: apply the weight before rounding.
    """
    x, normed = x if x.stride(-1) == 1 else x.contiguous(), x.new_empty(x.shape)
    _launch_norm(x, None, None, weight, None, normed, eps, in_float32=in_float32)
    return normed


def rms_norm_(x: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> None:
    """As `rms_norm`, in place."""
    _launch_norm(x, None, None, weight, None, x, eps, in_float32=in_float32)


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, in_float32: bool, delta_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMS norm; all [T, H]. `delta_weight`: of an RMS norm of delta before it is added."""
    x = x.contiguous()
    added, normed = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, delta, delta_weight, weight, added, normed, eps, in_float32=in_float32)
    return added, normed


def add_normed(x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> Tensor:
    """x + the RMS norm of delta; all [T, H]."""
    x = x.contiguous()
    added = torch.empty_like(x)
    _launch_norm(x, delta, weight, None, added, None, eps, in_float32=in_float32)
    return added


def _launch_norm(
    x: Tensor,
    delta: Tensor | None,
    delta_weight: Tensor | None,
    weight: Tensor | None,
    added: Tensor | None,
    normed: Tensor | None,
    eps: float,
    *,
    in_float32: bool,
) -> None:
    """`added` is contiguous, `normed` too unless it is x; x may be a part of the heads of a tensor."""
    width = x.shape[-1]
    pad = triton.next_power_of_2(width)
    inner, strides = (1, (x.stride(0), 0)) if x.dim() == 2 else (x.shape[1], x.stride()[:2])
    others = (None if delta is None else delta.contiguous(), delta_weight, weight, added, normed)
    _rms_norm_kernel[(x.numel() // width,)](
        x,
        *(x if other is None else other for other in others),  # x: a pointer that is not used
        eps,
        inner,
        *strides,
        *(strides if normed is x else (inner * width, width)),
        WIDTH=width,
        PAD=pad,
        IN_FLOAT32=in_float32,
        ADD=delta is not None,
        NORM_DELTA=delta_weight is not None,
        NORM_SUM=weight is not None,
        num_warps=min(16, max(1, pad // 512)),
    )


def norm_heads(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor | None,
    v_weight: Tensor | None,
    *,
    kv_heads: int,
    eps: float,
    in_float32: bool,
) -> None:
    """RMS norm of queries, keys and values [T, A + 2 K, D] in place, each head with weights [D]; none: not normed."""
    tokens, all_heads, d = qkv.shape
    _norm_heads_kernel[tokens, all_heads](
        qkv,
        q_weight,
        q_weight if k_weight is None else k_weight,
        q_weight if v_weight is None else v_weight,
        eps,
        kv_heads,
        qkv.stride(0),
        HEADS=all_heads - 2 * kv_heads,
        D=d,
        D_PAD=triton.next_power_of_2(d),
        IN_FLOAT32=in_float32,
        KEYS=k_weight is not None,
        VALUES=v_weight is not None,
        num_warps=1,
    )


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up [T, M] of [T, 2 M]."""
    tokens, width = len(gate_up), gate_up.shape[-1] // 2
    out = gate_up.new_empty(tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    _gated_kernel[tokens, triton.cdiv(width, block)](
        gate_up, out, width, ACTIVATION=ACTIVATION_NUMBERS[activation], BLOCK=block
    )
    return out


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, gate_first: bool = False, sigmoid: bool = False
) -> Tensor:
    """Norm of what a recurrence gives, and its gate.

    Args:
        x: [T, groups, width] float32; each group has a norm of its own.
        gate: [T, groups * width], whose rows may be parts of longer ones.
        weight: [width], or [groups * width] where groups have weights of their own; none: no norm.
        eps: of the norm.
        gate_first: norm what is multiplied by the gate.
        sigmoid: activation of the gate, which else is SiLU.

    Returns:
        [T, groups * width] in the gate's dtype.
    """
    tokens, groups, width = x.shape
    out, pad = gate.new_empty(tokens, groups * width), triton.next_power_of_2(width)
    _gated_norm_kernel[tokens, groups](
        x.contiguous(),
        gate,
        x if weight is None else weight,
        out,
        eps,
        groups,
        gate.stride(0),
        0 if weight is None or len(weight) == width else width,
        WIDTH=width,
        PAD=pad,
        NORM=weight is not None,
        GATE_FIRST=gate_first,
        SIGMOID=sigmoid,
        num_warps=min(16, max(1, pad // 512)),
    )
    return out
