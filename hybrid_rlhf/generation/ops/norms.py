"""RMS norms, of a tensor or of a sum.

The kernel adds the output of a layer to the residual stream and norms the sum, in float32. Other norms are computed by
torch (model/layers.py).

Shapes: T tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.functional.triton_language import tl, triton


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> Tensor:
    """Reference implementation of `norm`."""
    if in_float32:
        return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


@triton.jit
def rms_normed(x, weight, place, inside, eps, dtype, WIDTH: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """RMS norm of a row in float32."""
    x = x / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if not IN_FLOAT32:
        x = x.to(dtype).to(tl.float32)
    return x * w


@triton.jit
def normed_at(source, weight, place, eps, WIDTH: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """RMS norm of the row at `source`, in float32."""
    x = tl.load(source + place, mask=place < WIDTH, other=0.0).to(tl.float32)
    return rms_normed(x, weight, place, place < WIDTH, eps, source.dtype.element_ty, WIDTH, IN_FLOAT32)


@triton.jit
def _norm_kernel(
    x,
    delta,
    weight,
    added,
    normed,
    eps,
    inner,
    outer_stride,
    inner_stride,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    ADD: tl.constexpr,
):
    """Compute the RMS norm of a row of x, or of x + delta, which is also stored."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PAD)
    inside = place < WIDTH
    dtype = x.dtype.element_ty
    source = x + row // inner * outer_stride + row % inner * inner_stride
    value = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        value = value.to(dtype)
        tl.store(added + row * WIDTH + place, value, mask=inside)
        value = value.to(tl.float32)
    out = rms_normed(value, weight, place, inside, eps, dtype, WIDTH, IN_FLOAT32)
    tl.store(normed + row * WIDTH + place, out, mask=inside)


def norm(x: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> Tensor:
    """Return the RMS norm of x [T, H] or of heads [T, heads, H], which may be parts of longer rows.

    Args:
        x: input; rows are copied unless contiguous.
        weight: [H].
        eps: added to the mean square.
        in_float32: apply the weight before rounding.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    normed = x.new_empty(x.shape)
    _launch(x, None, weight, x, normed, eps, in_float32)
    return normed


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> tuple[Tensor, Tensor]:
    """Return x + delta and its RMS norm, each [T, H]."""
    x = x.contiguous()
    added = torch.empty_like(x)
    normed = torch.empty_like(x)
    _launch(x, delta.contiguous(), weight, added, normed, eps, in_float32)
    return added, normed


def _launch(
    x: Tensor, delta: Tensor | None, weight: Tensor, added: Tensor, normed: Tensor, eps: float, in_float32: bool
) -> None:
    width = x.shape[-1]
    pad = triton.next_power_of_2(width)
    inner, strides = (1, (x.stride(0), 0)) if x.dim() == 2 else (x.shape[1], x.stride()[:2])
    _norm_kernel[(x.numel() // width,)](
        x,
        x if delta is None else delta,
        weight,
        added,
        normed,
        eps,
        inner,
        *strides,
        WIDTH=width,
        PAD=pad,
        IN_FLOAT32=in_float32,
        ADD=delta is not None,
        num_warps=min(16, max(1, pad // 512)),
    )
