"""Triton kernels of norms, each with what is next to it.

Residual addition and the norms before and after it are one kernel, and so are the norms of all heads, and norm and gate
of a recurrent layer. The references in torch are in layers.py and recurrent/mixers.py. All arithmetic is float32; the
references round intermediate results to the dtype of the model.

Shapes: T tokens, A heads and K KV heads of this rank, D head size, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.generation.ops.triton_language import tl, triton


@triton.jit
def rms_normed(x, weight, place, inside, eps, dtype, WIDTH: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """RMS norm of a row in float32."""
    x = x / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if not IN_FLOAT32:
        x = x.to(dtype).to(tl.float32)
    return x * w


@triton.jit
def normed_at(given, weight, place, eps, WIDTH: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """RMS norm of the row at `given`."""
    x = tl.load(given + place, mask=place < WIDTH, other=0.0).to(tl.float32)
    return rms_normed(x, weight, place, place < WIDTH, eps, given.dtype.element_ty, WIDTH, IN_FLOAT32)


@triton.jit
def _row_normed(
    x,
    weight,
    bias,
    place,
    inside,
    eps,
    dtype,
    WIDTH: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    CENTER: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Layer norm of a row in float32, or its RMS norm."""
    if CENTER:
        x = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
        x = rms_normed(x, weight, place, inside, eps, dtype, WIDTH, True)
        if BIAS:
            x += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    else:
        x = rms_normed(x, weight, place, inside, eps, dtype, WIDTH, IN_FLOAT32)
    return x


@triton.jit
def _norm_kernel(
    x,
    delta,
    delta_weight,
    weight,
    bias,
    added,
    normed,
    eps,
    scale,
    inner,
    outer_stride,
    inner_stride,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    NORM_DELTA: tl.constexpr,
    NORM_SUM: tl.constexpr,
    CENTER: tl.constexpr,
    BIAS: tl.constexpr,
):
    """A row of x, to which scale times delta or its RMS norm is added, and the RMS or layer norm of the sum."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    inside = place < WIDTH
    dtype = x.dtype.element_ty
    source = x + row // inner * outer_stride + row % inner * inner_stride
    both = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        d = tl.load(delta + row * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        if NORM_DELTA:
            d = rms_normed(d, delta_weight, place, inside, eps, dtype, WIDTH, IN_FLOAT32).to(dtype).to(tl.float32)
        if SCALE:
            d = (d * scale).to(dtype).to(tl.float32)
        both = (both + d).to(dtype)
        tl.store(added + row * WIDTH + place, both, mask=inside)
        both = both.to(tl.float32)
    if NORM_SUM:
        out = _row_normed(both, weight, bias, place, inside, eps, dtype, WIDTH, IN_FLOAT32, CENTER, BIAS)
        tl.store(normed + row * WIDTH + place, out, mask=inside)


@triton.jit
def _norm_heads_kernel(
    qkv,
    q_weight,
    k_weight,
    v_weight,
    q_bias,
    k_bias,
    eps,
    kv_heads,
    row_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    OWN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    CENTER: tl.constexpr,
    BIAS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Norm of one head of one token, in place: of queries, of keys and of values, where they have a weight; with OWN
    weights of each head, or D that all share."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, D_PAD)
    inside = place < D
    dtype = qkv.dtype.element_ty
    source = qkv + row * row_stride + head * D + place
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS:
        weight = q_weight + head * OWN * D
        x = _row_normed(x, weight, q_bias, place, inside, eps, dtype, D, IN_FLOAT32, CENTER, BIAS)
        tl.store(source, x, mask=inside)
    elif head < HEADS + kv_heads:
        if KEYS:
            weight = k_weight + (head - HEADS) * OWN * D
            x = _row_normed(x, weight, k_bias, place, inside, eps, dtype, D, IN_FLOAT32, CENTER, BIAS)
            tl.store(source, x, mask=inside)
    elif VALUES:
        x = _row_normed(x, v_weight, q_bias, place, inside, eps, dtype, D, IN_FLOAT32, CENTER, False)
        tl.store(source, x, mask=inside)


@triton.jit
def _norm_all_heads_kernel(
    qkv,
    q_weight,
    k_weight,
    eps,
    row_stride,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    Q_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
):
    """RMS norm of all queries or of all keys of one token, in place."""
    row = qkv + tl.program_id(0).to(tl.int64) * row_stride
    if tl.program_id(1) == 0:
        q_place = tl.arange(0, Q_PAD)
        tl.store(row + q_place, normed_at(row, q_weight, q_place, eps, Q_WIDTH, True), mask=q_place < Q_WIDTH)
    else:
        k_place = tl.arange(0, K_PAD)
        k = normed_at(row + Q_WIDTH, k_weight, k_place, eps, K_WIDTH, True)
        tl.store(row + Q_WIDTH + k_place, k, mask=k_place < K_WIDTH)


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


def norm(
    x: Tensor, weight: Tensor, eps: float, *, in_float32: bool, center: bool = False, bias: Tensor | None = None
) -> Tensor:
    """RMS norm of x [T, H] or of its heads [T, heads, H].

    Args:
        x: rows contiguous.
        weight: [H].
        eps: added to the mean square.
        in_float32: apply the weight before rounding, as a layer norm always does.
        center: layer norm.
        bias: [H] of a layer norm, or none.
    """
    x, normed = x if x.stride(-1) == 1 else x.contiguous(), x.new_empty(x.shape)
    _launch_norm(x, None, None, weight, None, normed, eps, in_float32=in_float32, center=center, bias=bias)
    return normed


def add_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    *,
    in_float32: bool,
    center: bool = False,
    bias: Tensor | None = None,
    delta_weight: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """x + scale * delta, and its norm; all [T, H].

    `delta_weight`: of an RMS norm of delta before it is added; the others are those of `norm`.
    """
    x = x.contiguous()
    added, normed = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(
        x, delta, delta_weight, weight, added, normed, eps, in_float32=in_float32, center=center, bias=bias, scale=scale
    )
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
    center: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """`added` and `normed` are contiguous; x may be a part of the heads of a tensor."""
    width = x.shape[-1]
    pad = triton.next_power_of_2(width)
    inner, strides = (1, (x.stride(0), 0)) if x.dim() == 2 else (x.shape[1], x.stride()[:2])
    others = (None if delta is None else delta.contiguous(), delta_weight, weight, bias, added, normed)
    _norm_kernel[(x.numel() // width,)](
        x,
        *(x if other is None else other for other in others),  # x: a pointer that is not used
        eps,
        scale,
        inner,
        *strides,
        WIDTH=width,
        PAD=pad,
        IN_FLOAT32=in_float32,
        ADD=delta is not None,
        SCALE=scale != 1.0,
        NORM_DELTA=delta_weight is not None,
        NORM_SUM=weight is not None,
        CENTER=center,
        BIAS=bias is not None,
        num_warps=_warps(pad),
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
    center: bool = False,
    biases: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Norms of queries, keys and values [T, A + 2 K, D] in place, each head by itself.

    Args:
        qkv: rows may be parts of longer ones.
        q_weight: [D], or [A, D] of each head.
        k_weight: [D] or [K, D]; none: keys stay as they are.
        v_weight: [D]; none: values stay as they are.
        kv_heads: K.
        eps: added to the mean square.
        in_float32: apply weights before rounding.
        center: layer norms.
        biases: [D] of queries and of keys, or none.
    """
    tokens, all_heads, d = qkv.shape
    others = (q_weight, k_weight, v_weight, *(biases or (None, None)))
    _norm_heads_kernel[tokens, all_heads](
        qkv,
        *(q_weight if other is None else other for other in others),  # q_weight: not used
        eps,
        kv_heads,
        qkv.stride(0),
        HEADS=all_heads - 2 * kv_heads,
        D=d,
        D_PAD=triton.next_power_of_2(d),
        OWN=q_weight.dim() - 1,
        IN_FLOAT32=in_float32,
        CENTER=center,
        BIAS=biases is not None,
        KEYS=k_weight is not None,
        VALUES=v_weight is not None,
        num_warps=1,
    )


def norm_all_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, *, kv_heads: int, eps: float) -> None:
    """RMS norms over all heads of queries and over all heads of keys in place, of [T, A + 2 K, D].

    Weights are [A D] and [K D] and are applied before rounding.
    """
    q_width, k_width = len(q_weight), len(k_weight)
    pad = triton.next_power_of_2(q_width)
    _norm_all_heads_kernel[len(qkv), 2](
        qkv,
        q_weight,
        k_weight,
        eps,
        qkv.stride(0),
        Q_WIDTH=q_width,
        K_WIDTH=k_width,
        Q_PAD=pad,
        K_PAD=triton.next_power_of_2(k_width),
        num_warps=_warps(pad),
    )


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, gate_first: bool = False, sigmoid: bool = False
) -> Tensor:
    """Norm of what a recurrence gives, and its gate; or the gate of attention.

    Args:
        x: [T, groups, width]; each group has a norm of its own.
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
        num_warps=_warps(pad),
    )
    return out


def _warps(pad: int) -> int:
    """Of a program that has a row of so many elements."""
    return min(16, max(1, pad // 512))
