"""Triton and its language, or stand-ins where Triton is not installed: kernels are then defined but never launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:

    def _jit(kernel: Any = None, **_: Any) -> Any:
        return _jit if kernel is None else kernel

    triton = SimpleNamespace(jit=_jit)  # type: ignore[assignment]
    tl = SimpleNamespace(constexpr=lambda value: value)  # type: ignore[assignment]

__all__ = ["tl", "triton"]
