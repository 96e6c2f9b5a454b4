"""Linear layers, RMS norms and rotary positions, faster or more exact than torch composes them.

float32 linear layers on a CPU are computed by oneDNN or torch. torch calls MKL, which does not use AVX-512 on AMD
processors, where oneDNN takes half the time. On Intel processors MKL is faster. The choice is process-wide;
`runtime/product_backend.py` sets it. Products in another dtype or on another device, and small ones, are
always computed by torch.

`wide_linear` multiplies bfloat16 or float16 matrices and returns float32: torch rounds a product to the dtype of its
factors, which changes log-probs in bfloat16 by 0.02 nats per token on average, while GSPO clips at 3e-4. MiniMax-M1
(arXiv 2506.13585, section 3.2) and ScaleRL (arXiv 2510.13786) compute the head in float32 for this reason. On a GPU the
factors keep their dtype and torch.mm's out_dtype returns the float32 sums of the tensor cores; elsewhere the second
factor is converted some rows at a time. The wide products have no gradient.

The hidden states of a batch do not fit in the caches of a CPU, so each elementwise operation costs a pass over memory
and the start of a parallel region. A norm composed of autograd's operations takes 19 passes forward and backward, here
9; rotary positions take 17 per tensor, here 6.

Shapes: T tokens, N outputs, K inputs, H hidden, A heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LEAST_PRODUCTS = 2**22
"""torch computes products with fewer multiplications, since the choice makes no difference."""
Backend = Literal["onednn", "torch"]
BACKENDS: tuple[Backend, ...] = ("onednn", "torch")
_backend: Backend = "onednn"


def use_backend(name: Backend) -> None:
    """Select the backend of this process's products from now on; a backward uses the backend of its forward."""
    global _backend
    _backend = name


def backend() -> Backend:
    """The current backend of this process."""
    return _backend


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., N], of x [..., K], weight [N, K] and bias [N].

    Differentiable once with oneDNN. ZeRO-3 may release and gather the weight's memory before backward.
    """
    if not _by_onednn(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` by oneDNN, for a plain weight or one packed into oneDNN's blocked format; without gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """oneDNN's linear layer; each gradient is also a linear product: dx = g (W^T)^T, dW = g^T (x^T)^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2).contiguous()
        return (
            onednn_linear(rows, weight.t()).view(*grad.shape[:-1], -1) if needs_x else None,
            onednn_linear(rows.t(), x.flatten(0, -2).t()) if needs_weight else None,
            rows.sum(dim=0) if needs_bias else None,
        )


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return bool(
        _backend == "onednn"
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * len(weight) >= _LEAST_PRODUCTS
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
    )


CONVERTED_ROWS = 8192
"""Rows of a weight that are converted to float32 at a time, on devices without a mixed-precision product."""


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x W^T + b, [T, N] float32, of x [T, K], weight [N, K] and bias [N] of one dtype; float64 for float64.

    Args:
        x: [T, K].
        weight: [N, K].
        bias: [N], or None.
        out: [T, N], tensor to write into; None allocates a new one.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if out is None:
        out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    if x.dtype == dtype:
        return out.copy_(linear(x, weight, bias))
    if _has_float32_output(x):
        torch.mm(x, weight.t(), out_dtype=dtype, out=out)  # type: ignore[call-overload]
    else:
        rows = x.to(dtype)
        for start in range(0, len(weight), CONVERTED_ROWS):
            part = slice(start, start + CONVERTED_ROWS)
            out[:, part] = linear(rows, weight[part].to(dtype))
    return out if bias is None else out.add_(bias)


def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [N, K] += left [N, T] @ right [T, K], with factors of a lower dtype or of total's.

    On a GPU nothing is rounded and no temporary product is allocated; elsewhere a product in a lower dtype is rounded
    to that dtype before it is added.
    """
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    elif _has_float32_output(left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total += left @ right


def _has_float32_output(factor: Tensor) -> bool:
    """Return True if torch.mm supports an out_dtype of float32 on the device."""
    return factor.device.type == "cuda" and torch.version.hip is None


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, [..., H] of x [..., H] and weight [H], both float32; differentiable once.

    ZeRO-3 may release and gather the weight's memory before backward.
    """
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x cos + rotate_half(x) sin, differentiable once in x.

    Args:
        x: [B, A, T, D], in any memory format; the result has the same format.
        cos: [B or 1, 1, T, D].
        sin: [B or 1, 1, T, D].

    Returns:
        [B, A, T, D].
    """
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    """With n = 1 / sqrt(mean(x^2) + eps): dx = n g w - x n^3 mean(x g w), dw = sum of x g n over tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.flatten(0, -2)
        inverse = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (rows * inverse).mul_(weight).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        rows = x.flatten(0, -2)
        grad_rows = grad.flatten(0, -2)
        both = rows * grad_rows
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            along = torch.mv(both, weight)[:, None].mul_(inverse.pow(3)).div_(-x.shape[-1])
            grad_x = (grad_rows * weight).mul_(inverse).addcmul_(rows, along).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.mv(both.t(), inverse[:, 0])
        return grad_x, grad_weight, None


class _Rotate(torch.autograd.Function):
    """Backward is the transposed rotation: the sines of the halves are exchanged and negated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = sin.chunk(2, dim=-1)
        return _rotated(x, cos, -first, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        first, second = sin.chunk(2, dim=-1)
        return _rotated(grad, cos, second, -first), None, None


def _rotated(x: Tensor, cos: Tensor, of_first: Tensor, of_second: Tensor) -> Tensor:
    """x cos, plus each half of x times a factor, added to the other half."""
    out = torch.mul(x, cos, out=torch.empty_like(x))
    (x_first, x_second) = x.chunk(2, dim=-1)
    (first, second) = out.chunk(2, dim=-1)
    first.addcmul_(x_second, of_first)
    second.addcmul_(x_first, of_second)
    return out


_Function = Callable[[Tensor], Tensor]


def with_gradient(x: Tensor, forward: _Function, backward: _Function) -> Tensor:
    """forward(x), whose gradient for x is `backward` of the gradient of the result; for linear functions."""
    return _WithGradient.apply(x, forward, backward)  # type: ignore[no-any-return]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Function, backward: _Function) -> Tensor:
        ctx.of_input = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of_input(grad), None, None
