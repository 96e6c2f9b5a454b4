"""Codes of 8 bits of the rows of weights and of the inputs of products.

`quantise` is the reference of the kernel for inputs on a GPU. A program of it reads a row twice: for its largest value,
and for the codes.

Shapes: T tokens, K inputs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybrid_rlhf.generation.ops.triton_language import tl, triton

Quantization = Literal["int8", "fp8"]
CODES: dict[Quantization, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
"""Dtype of the codes, and the largest one."""
SMALLEST = 1e-30
"""Largest value of a row of zeros, for the division."""
_BLOCK = 4096
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Floats from here to twice that are the integers: adding it and taking it away rounds to the nearest, ties to even."""


def quantise(rows: Tensor, kind: Quantization) -> tuple[Tensor, Tensor]:
    """Codes of each row, and the float32 value [rows] that code 1 of it stands for."""
    dtype, most = CODES[kind]
    values = rows.float()
    largest = values.abs().amax(dim=1).clamp(min=SMALLEST)
    codes = values * (most / largest)[:, None]
    return (codes.round() if kind == "int8" else codes).to(dtype), largest / most


@triton.jit
def _quantise_kernel(x, codes, scales, width, most, smallest, stride, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of a row, and the value that code 1 stands for."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x, codes = x + row * stride, codes + row * width
    largest, broken = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        value = tl.load(x + first + place, mask=first + place < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        broken |= (value != value).to(tl.int32)
    top = tl.maximum(tl.max(largest, 0), smallest)
    top = tl.where(tl.max(broken, 0) > 0, float("nan"), top)  # a maximum may pass over what is no number
    factor = tl.div_rn(1.0, top) * most  # as torch divides a number by a tensor
    for first in range(0, width, BLOCK):
        inside = first + place < width
        code = tl.load(x + first + place, mask=inside, other=0.0).to(tl.float32) * factor
        if ROUND:
            code = (code + _TO_INTEGER) - _TO_INTEGER
        tl.store(codes + first + place, code.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, tl.div_rn(top, most))


def quantise_rows(x: Tensor, dtype: torch.dtype, *, most: float, smallest: float, rows: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, K] of x [T, K], any behind T, and the float32 value [T] that code 1 of each row stands for.

    Args:
        x: inputs; those of a row are contiguous.
        dtype: of the codes.
        most: the largest code.
        smallest: what the largest value of a row is taken for at least.
        rows: of the codes, at least T.
    """
    count, width = x.shape
    codes, scales = x.new_empty(rows, width, dtype=dtype), x.new_empty(count, dtype=torch.float32)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _quantise_kernel[(count,)](
        *(x, codes, scales, width, most, smallest, x.stride(0)), ROUND=not dtype.is_floating_point, BLOCK=block
    )
    return codes, scales
