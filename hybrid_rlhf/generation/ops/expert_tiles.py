"""Parts of the kernels of experts (experts.py): the rows of a program's tile, their products, and the activation.

Shapes: T tokens, k experts per token, X experts of this rank.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.generation.ops.rows import activated
from hybrid_rlhf.generation.ops.triton_language import tl, triton

CLAMPED = -1
"""Number of the clamped SwiGLU of gpt-oss."""
_FEWEST_ROWS, _MOST_ROWS = 16, 64
"""Rows of a tile: the fewest that tensor cores multiply, and the most."""
_COMPARED, _FEWEST_SCANNED = 8192, 128
"""Rows times choices that are compared at once, to find an expert's choices; and the fewest choices, so that few
kernels are compiled."""


@triton.jit
def expert_of(indices, first_expert, experts, BY_CHOICE: tl.constexpr, SCANNED: tl.constexpr):
    """The expert of this program on its rank; -1 if it has none."""
    expert = tl.program_id(0)
    if BY_CHOICE:
        place = tl.arange(0, SCANNED)
        wanted = tl.load(indices + tl.program_id(0))
        others = tl.load(indices + place, mask=place < tl.program_id(0), other=-1)
        earlier = tl.max(tl.where(others == wanted, 1, 0), 0)
        expert = wanted - first_expert
        expert = tl.where((earlier == 0) & (expert >= 0) & (expert < experts), expert, -1)
    return expert


@triton.jit
def choices_of(indices, wanted, choices, start, ROWS: tl.constexpr, SCANNED: tl.constexpr):
    """Choices number start to start + ROWS - 1 of an expert, -1 behind its last; and how many it has."""
    number = start + tl.arange(0, ROWS)
    found = tl.full([ROWS], -1, tl.int32)
    count = 0
    for begin in range(0, choices, SCANNED):
        choice = begin + tl.arange(0, SCANNED)
        own = tl.load(indices + choice, mask=choice < choices, other=-1) == wanted
        ones = own.to(tl.int32)
        at = tl.where(own, count + tl.cumsum(ones, 0) - 1, -1)
        here = tl.where(at[None, :] == number[:, None], choice[None, :], -1)
        found = tl.maximum(found, tl.max(here, 1))
        count += tl.sum(ones, 0)
    return found, count


@triton.jit
def shared_tile(number, tokens, ROWS: tl.constexpr):
    """The part of the shared expert and the tokens of tile `number`."""
    blocks = tl.cdiv(tokens, ROWS)
    return number // blocks, number % blocks * ROWS + tl.arange(0, ROWS)


@triton.jit
def products(
    source,
    weights,
    real,
    known,
    inputs,
    length,
    column_stride,
    behind,
    STEP: tl.constexpr,
    GATED: tl.constexpr = False,
    factors=0,
    WEIGHS: tl.constexpr = False,
):
    """Products [n, m] of rows at source [n, 1] with rows at weights [1, m] and, if gated, with those `behind` them.

    Rows have so many inputs, of which `length`, all or none, are multiplied. Factors at [n] may weigh the source.
    """
    factor = 1.0
    if WEIGHS:
        factor = tl.load(factors, mask=real, other=0.0)[:, None].to(source.dtype.element_ty).to(tl.float32)
    first = tl.zeros([source.shape[0], weights.shape[1]], tl.float32)
    second = tl.zeros([source.shape[0], weights.shape[1]], tl.float32)
    for begin in range(0, length, STEP):
        place = begin + tl.arange(0, STEP)
        inside = place < inputs
        a = tl.load(source + place[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        if WEIGHS:
            a = (a.to(tl.float32) * factor).to(a.dtype)
        where = weights + place[:, None] * column_stride
        kept = known[None, :] & inside[:, None]
        first = tl.dot(a, tl.load(where, mask=kept, other=0.0), first, input_precision="ieee")
        if GATED:
            second = tl.dot(a, tl.load(where + behind, mask=kept, other=0.0), second, input_precision="ieee")
    return first, second


@triton.jit
def biased(first, second, biases, known, behind, GATED: tl.constexpr):
    """Products of `products` with biases at [m]."""
    first += tl.load(biases, mask=known, other=0.0).to(tl.float32)[None, :]
    if GATED:
        second += tl.load(biases + behind, mask=known, other=0.0).to(tl.float32)[None, :]
    return first, second


@triton.jit
def inner_units_of(first, second, limit, GATED: tl.constexpr, ACTIVATION: tl.constexpr):
    """The activation of up, or that of the gate times up, of their products."""
    if ACTIVATION == -1:
        gate, value = tl.minimum(first, limit), tl.minimum(tl.maximum(second, -limit), limit)
        return (value + 1.0) * gate * tl.sigmoid(1.702 * gate)
    elif GATED:
        return activated(first, ACTIVATION) * second
    else:
        return activated(first, ACTIVATION)


def tile_of(indices: Tensor, experts: int) -> dict[str, int]:
    """ROWS, SCANNED and BY_CHOICE of the products of choices [T, k], for X experts of this rank."""
    choices = indices.numel()
    each = triton.next_power_of_2(triton.cdiv(choices, experts))
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, each))
    scanned = min(_COMPARED // rows, max(_FEWEST_SCANNED, triton.next_power_of_2(choices)))
    return {"ROWS": rows, "SCANNED": scanned, "BY_CHOICE": choices <= min(experts, scanned)}


def programs_of(indices: Tensor, experts: int, tile: dict[str, int], *, rows: int) -> int:
    """Those that look for an expert with choices, and those of the shared expert's part of `rows`."""
    tokens, k = indices.shape
    return (indices.numel() if tile["BY_CHOICE"] else experts) + (rows // tokens - k) * triton.cdiv(
        tokens, tile["ROWS"]
    )


def shared_arguments(shared: Tensor | None, other: Tensor, units: int) -> tuple[Tensor | int, ...]:
    """The weights of a shared expert, its units and strides; without one `other`, which is not used."""
    return (other, 0, 0, 0) if shared is None else (shared, units, *shared.stride())
