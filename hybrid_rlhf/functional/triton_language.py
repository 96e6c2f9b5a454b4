"""Triton and its language, or stand-ins without Triton, with which kernels can be defined but not launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ModuleNotFoundError:
    HAS_TRITON = False

    def _jit(kernel: Any = None, **_: Any) -> Any:
        return _jit if kernel is None else kernel

    triton = SimpleNamespace(jit=_jit)  # type: ignore[assignment]
    tl = SimpleNamespace(constexpr=lambda value: value)  # type: ignore[assignment]

__all__ = ["HAS_TRITON", "tl", "triton"]
