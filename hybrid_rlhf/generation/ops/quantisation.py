"""Quantisation of the rows of weights and inputs to 8-bit codes.

`quantise` is the reference of the kernel, which quantises inputs on a GPU. A program reads a row twice: for its largest
value, and for the codes.

Shapes: T tokens, K inputs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybrid_rlhf.functional.triton_language import tl, triton

Quantization = Literal["int8", "fp8"]
CODES: dict[Quantization, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
"""Dtype of the codes, and the largest code."""
SMALLEST = 1e-30
"""Lower bound of the largest value of a row, to avoid division by zero."""
_BLOCK = 4096
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Floats from this number to twice it are the integers: adding and subtracting it rounds to nearest, ties to even."""


def quantise(rows: Tensor, kind: Quantization) -> tuple[Tensor, Tensor]:
    """Return the codes of each row, and the float32 value [rows] of code 1 in each row."""
    dtype, most = CODES[kind]
    values = rows.float()
    largest = values.abs().amax(dim=1).clamp(min=SMALLEST)
    codes = values * (most / largest)[:, None]
    return (codes.round() if kind == "int8" else codes).to(dtype), largest / most


@triton.jit
def _quantise_kernel(x, codes, scales, width, most, smallest, stride, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the codes of a row, and the value of code 1."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x = x + row * stride
    codes = codes + row * width
    largest = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        value = tl.load(x + first + place, mask=first + place < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        broken |= (value != value).to(tl.int32)
    top = tl.maximum(tl.max(largest, 0), smallest)
    top = tl.where(tl.max(broken, 0) > 0, float("nan"), top)  # tl.max may ignore NaN
    factor = tl.div_rn(1.0, top) * most  # as torch divides a number by a tensor: by the reciprocal
    for first in range(0, width, BLOCK):
        inside = first + place < width
        code = tl.load(x + first + place, mask=inside, other=0.0).to(tl.float32) * factor
        if ROUND:
            code = (code + _TO_INTEGER) - _TO_INTEGER
        tl.store(codes + first + place, code.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, tl.div_rn(top, most))


def quantise_rows(x: Tensor, dtype: torch.dtype, *, most: float, smallest: float, rows: int) -> tuple[Tensor, Tensor]:
    """Return codes [rows, K] of x [T, K], uninitialised after row T, and the float32 value [T] of code 1 in each row.

    Args:
        x: inputs with contiguous rows.
        dtype: dtype of the codes.
        most: the largest code.
        smallest: lower bound of the largest value of a row.
        rows: number of rows of the codes, at least T.
    """
    count, width = x.shape
    codes = x.new_empty(rows, width, dtype=dtype)
    scales = x.new_empty(count, dtype=torch.float32)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _quantise_kernel[(count,)](
        *(x, codes, scales, width, most, smallest, x.stride(0)), ROUND=not dtype.is_floating_point, BLOCK=block
    )
    return codes, scales
