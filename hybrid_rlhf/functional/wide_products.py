"""Products of bfloat16 or float16 matrices that are summed and stay in float32.

Why: torch rounds a product to the dtype of its factors. For a head's logits in bfloat16 that is 0.02 nats a token on
average, where GSPO clips at 3e-4; MiniMax-M1 (arXiv 2506.13585, section 3.2) and ScaleRL (arXiv 2510.13786) therefore
compute the head in float32.

On a GPU the factors stay as they are and the tensor cores' float32 sums are written out (torch.mm's out_dtype), so that
nothing more is read or held. Elsewhere the second factor is converted some rows at a time. Nothing here has a gradient.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.functional.products import linear

CONVERTED_ROWS = 8192
"""Rows of a weight that are held in float32 at a time where the device has no such product."""


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x W^T + b, [T, N] float32, of x [T, K], weight [N, K] and bias [N] of one dtype; float64 stays.

    Args:
        x: rows.
        weight: of the layer.
        bias: of the layer, or none.
        out: [T, N] to write into; none: a new tensor.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if out is None:
        out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    if x.dtype == dtype:
        return out.copy_(linear(x, weight, bias))
    if _sums_are_kept(x):
        torch.mm(x, weight.t(), out_dtype=dtype, out=out)  # type: ignore[call-overload]
    else:
        rows = x.to(dtype)
        for start in range(0, len(weight), CONVERTED_ROWS):
            part = slice(start, start + CONVERTED_ROWS)
            out[:, part] = linear(rows, weight[part].to(dtype))
    return out if bias is None else out.add_(bias)


def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [N, K] += left [N, T] @ right [T, K], of factors of a lower dtype, or total's own.

    On a GPU nothing is rounded and no product is held beside the total; elsewhere one of lower dtype is rounded to it
    before it is added.
    """
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    elif _sums_are_kept(left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total += left @ right


def _sums_are_kept(factor: Tensor) -> bool:
    """Whether torch.mm has an out_dtype of float32 there."""
    return factor.device.type == "cuda" and torch.version.hip is None
