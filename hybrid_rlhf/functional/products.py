"""The matrix products of linear layers in float32 on a CPU, forward and backward, by oneDNN or by torch's own library.

Why: torch calls MKL, which does not use the AVX-512 of AMD's processors: oneDNN takes half the time there. On Intel's
processors MKL is the faster one. The switch is process-wide; `runtime/product_backend.py` measures and sets it.
Products in another dtype or on another device, and small ones, are always torch's own.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LEAST_PRODUCTS = 2**22
"""Multiplications below which the time goes elsewhere."""
Backend = Literal["onednn", "torch"]
BACKENDS: tuple[Backend, ...] = ("onednn", "torch")
_backend: Backend = "onednn"


def use_backend(name: Backend) -> None:
    """Choose what computes the products of this process from now on; a backward follows the forward it belongs to."""
    global _backend
    _backend = name


def backend() -> Backend:
    """What computes the products of this process."""
    return _backend


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., N], of x [..., K], weight [N, K] and bias [N].

    Differentiable once if oneDNN computes it. ZeRO-3 may release and gather the weight's memory before backward.
    """
    if not _by_onednn(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same by oneDNN, of a weight as it is or packed into its blocked form; no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """Each gradient is a product of the same kind: dx = g (W^T)^T, dW = g^T (x^T)^T."""

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
