"""The chosen experts of a decoding step on a GPU in three launches: up with the activation, down, and the sum.

A program has some outputs of one expert. It finds the choices of its expert itself, among those of all tokens, so that
no launch sorts them and no shape depends on the routing, as a CUDA graph requires: there is a program for every expert
of this rank or, where there are fewer choices than experts, for every choice, of which the first of an expert works.
Each choice has a row of its own in what is between the launches, so that the sum over a token's choices has a fixed
order. Sums are float32; the rows in between are rounded to the model's dtype. The reference is the grouped product of
`RoutedExperts` (model/experts.py), which larger steps use on a GPU too.

Shapes: T tokens, H hidden, X experts of this rank, k experts per token, C = T k choices, I inner units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rlhf.generation.model.kernels.norms import rms_normed
from hybrid_rlhf.generation.model.kernels.rows import ACTIVATION_NUMBERS, activated
from hybrid_rlhf.generation.weights.description import Activation

_CLAMPED = -1
"""Number of the clamped SwiGLU of gpt-oss."""
_FEWEST_ROWS, _MOST_ROWS = 16, 64
"""Rows of a tile: the fewest that tensor cores multiply, and the most."""
_COMPARED, _FEWEST_SCANNED = 8192, 128
"""Rows times choices that are compared at once, to find an expert's choices; and the fewest choices, so that few
kernels are compiled."""
_SUMMED = 1024
"""Of a row, that a program sums where it does not norm all of it."""
_OUTPUTS = 64
"""Rows of weights in a tile; of up and gate half of them are gates."""
_STEP_BYTES, _STAGES = 128, 4
"""Of such a row, that are multiplied at once; and how many times a tile and that of the inputs are in shared memory."""


@triton.jit
def _expert_of(indices, choices, first_expert, experts, BY_CHOICE: tl.constexpr, SCANNED: tl.constexpr):
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
def _choices_of(indices, wanted, choices, start, ROWS: tl.constexpr, SCANNED: tl.constexpr):
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


@triton.jit(do_not_specialize=["choices"])
def _up_kernel(
    x,
    indices,
    weights,
    up,
    bias,
    inner_units,
    choices,
    first_expert,
    experts,
    per_token,
    hidden,
    units,
    x_stride,
    expert_stride,
    row_stride,
    column_stride,
    bias_stride,
    limit,
    ROWS: tl.constexpr,
    SCANNED: tl.constexpr,
    UNITS: tl.constexpr,
    STEP: tl.constexpr,
    BY_CHOICE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    """Some inner units [C, I] of the choices of one expert: the activation of up, or that of the gate times up."""
    expert = _expert_of(indices, choices, first_expert, experts, BY_CHOICE, SCANNED)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    known = unit < units
    own = up + expert.to(tl.int64) * expert_stride
    start, count = 0, tl.where(expert < 0, 0, 1)
    while start < count:
        choice, count = _choices_of(indices, expert + first_expert, choices, start, ROWS, SCANNED)
        real = choice >= 0
        source = x + (choice // per_token).to(tl.int64)[:, None] * x_stride
        factor = 1.0
        if WEIGHS:
            factor = tl.load(weights + choice, mask=real, other=0.0)[:, None].to(x.dtype.element_ty).to(tl.float32)
        first, second = tl.zeros([ROWS, UNITS], tl.float32), tl.zeros([ROWS, UNITS], tl.float32)
        for begin in range(0, tl.where(start < count, hidden, 0), STEP):
            place = begin + tl.arange(0, STEP)
            inside = place < hidden
            a = tl.load(source + place[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            if WEIGHS:
                a = (a.to(tl.float32) * factor).to(a.dtype)
            where = own + unit.to(tl.int64)[None, :] * row_stride + place[:, None] * column_stride
            kept = known[None, :] & inside[:, None]
            first = tl.dot(a, tl.load(where, mask=kept, other=0.0), first, input_precision="ieee")
            if GATED:
                where += units.to(tl.int64) * row_stride
                second = tl.dot(a, tl.load(where, mask=kept, other=0.0), second, input_precision="ieee")
        if BIAS:
            biases = bias + expert * bias_stride + unit
            first += tl.load(biases, mask=known, other=0.0).to(tl.float32)[None, :]
            if GATED:
                second += tl.load(biases + units, mask=known, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == -1:
            gate, value = tl.minimum(first, limit), tl.minimum(tl.maximum(second, -limit), limit)
            result = (value + 1.0) * gate * tl.sigmoid(1.702 * gate)
        elif GATED:
            result = activated(first, ACTIVATION) * second
        else:
            result = activated(first, ACTIVATION)
        target = inner_units + choice.to(tl.int64)[:, None] * units + unit[None, :]
        tl.store(target, result, mask=real[:, None] & known[None, :])
        start += ROWS


@triton.jit(do_not_specialize=["choices"])
def _down_kernel(
    inner_units,
    indices,
    weights,
    down,
    bias,
    out,
    choices,
    first_expert,
    experts,
    units,
    hidden,
    expert_stride,
    row_stride,
    column_stride,
    bias_stride,
    ROWS: tl.constexpr,
    SCANNED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    BY_CHOICE: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    """Some outputs [C, H] of the choices of one expert, times their weights."""
    expert = _expert_of(indices, choices, first_expert, experts, BY_CHOICE, SCANNED)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < hidden
    own = down + expert.to(tl.int64) * expert_stride
    start, count = 0, tl.where(expert < 0, 0, 1)
    while start < count:
        choice, count = _choices_of(indices, expert + first_expert, choices, start, ROWS, SCANNED)
        real = choice >= 0
        source = inner_units + choice.to(tl.int64)[:, None] * units
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for begin in range(0, tl.where(start < count, units, 0), STEP):
            place = begin + tl.arange(0, STEP)
            inside = place < units
            a = tl.load(source + place[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            where = own + output.to(tl.int64)[None, :] * row_stride + place[:, None] * column_stride
            b = tl.load(where, mask=known[None, :] & inside[:, None], other=0.0)
            sums = tl.dot(a, b, sums, input_precision="ieee")
        if BIAS:
            sums += tl.load(bias + expert * bias_stride + output, mask=known, other=0.0).to(tl.float32)[None, :]
        if WEIGHS:
            factor = tl.load(weights + choice, mask=real, other=0.0)
            sums *= factor.to(out.dtype.element_ty).to(tl.float32)[:, None]
        target = out + choice.to(tl.int64)[:, None] * hidden + output[None, :]
        tl.store(target, sums, mask=real[:, None] & known[None, :])
        start += ROWS


@triton.jit
def _sum_kernel(
    outputs,
    indices,
    first,
    second,
    out,
    normed,
    norm_weight,
    eps,
    first_expert,
    experts,
    hidden: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    NORM: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """A block of a row of the sum over a token's choices that are this rank's, and what is added to it; or the whole
    row, and its RMS norm."""
    token, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < hidden
    dtype = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(K):
        choice = token * K + number
        expert = tl.load(indices + choice) - first_expert
        own = (expert >= 0) & (expert < experts)
        total += tl.load(outputs + choice * hidden + place, mask=inside & own, other=0.0).to(tl.float32)
    where = token * hidden + place
    if ADDED > 0:
        total = total.to(dtype).to(tl.float32) + tl.load(first + where, mask=inside, other=0.0).to(tl.float32)
    if ADDED > 1:
        total = total.to(dtype).to(tl.float32) + tl.load(second + where, mask=inside, other=0.0).to(tl.float32)
    total = total.to(dtype)
    tl.store(out + where, total, mask=inside)
    if NORM:
        row = rms_normed(total.to(tl.float32), norm_weight, place, inside, eps, dtype, hidden, IN_FLOAT32)
        tl.store(normed + where, row, mask=inside)


def experts_up(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    up: Tensor,
    bias: Tensor | None,
    *,
    mine: range,
    inner: int,
    activation: Activation,
    clamp: float | None = None,
    weighs_inputs: bool = False,
) -> Tensor:
    """Inner units [T k, I] of each choice; those of choices that are other ranks' are unset.

    Args:
        x: [T, H], rows contiguous.
        weights: [T, k] float32.
        indices: [T, k] int32.
        up: [X, 2 I, H], gate and up, or up alone [X, I, H]; of any strides.
        bias: [X, 2 I] or [X, I], or none.
        mine: the experts of this rank.
        inner: I.
        activation: of the gate, or of up where there is none.
        clamp: the activation is the clamped SwiGLU of gpt-oss with this limit; none: as above.
        weighs_inputs: the weights multiply what goes in.
    """
    gated = up.shape[1] == 2 * inner
    tile = tile_of(indices, len(mine))
    units = units_of(gated)
    out = x.new_empty(indices.numel(), inner)
    _up_kernel[_programs(indices, len(mine), tile), triton.cdiv(inner, units)](
        x,
        indices,
        weights,
        up,
        up if bias is None else bias,
        out,
        indices.numel(),
        mine.start,
        len(mine),
        indices.shape[1],
        x.shape[1],
        inner,
        x.stride(0),
        *up.stride(),
        0 if bias is None else bias.stride(0),
        0.0 if clamp is None else clamp,
        **tile,
        UNITS=units,
        STEP=_STEP_BYTES // x.element_size(),
        GATED=gated,
        ACTIVATION=ACTIVATION_NUMBERS[activation] if clamp is None else _CLAMPED,
        BIAS=bias is not None,
        WEIGHS=weighs_inputs,
        num_stages=_STAGES,
    )
    return out


def experts_down(
    inner: Tensor, weights: Tensor | None, indices: Tensor, down: Tensor, bias: Tensor | None, *, mine: range
) -> Tensor:
    """Outputs [T k, H] of each choice; those of choices that are other ranks' are unset.

    Args:
        inner: [T k, I] of `experts_up`.
        weights: [T, k] float32 that multiply what comes out; none: they do not.
        indices: [T, k] int32.
        down: [X, H, I], of any strides.
        bias: [X, H], or none.
        mine: the experts of this rank.
    """
    hidden, tile = down.shape[1], tile_of(indices, len(mine))
    out = inner.new_empty(len(inner), hidden)
    _down_kernel[_programs(indices, len(mine), tile), triton.cdiv(hidden, _OUTPUTS)](
        inner,
        indices,
        inner if weights is None else weights,
        down,
        down if bias is None else bias,
        out,
        indices.numel(),
        mine.start,
        len(mine),
        inner.shape[1],
        hidden,
        *down.stride(),
        0 if bias is None else bias.stride(0),
        **tile,
        OUTPUTS=_OUTPUTS,
        STEP=_STEP_BYTES // inner.element_size(),
        BIAS=bias is not None,
        WEIGHS=weights is not None,
        num_stages=_STAGES,
    )
    return out


def sum_choices(outputs: Tensor, indices: Tensor, *, mine: range, added: Sequence[Tensor] = ()) -> Tensor:
    """[T, H], the sum of each token's outputs [T k, H] of experts of this rank, plus at most two [T, H]."""
    return _launch_sum(outputs, indices, None, 0.0, mine=mine, added=added, in_float32=False)[0]


def sum_and_norm(
    outputs: Tensor,
    indices: Tensor,
    weight: Tensor,
    eps: float,
    *,
    mine: range,
    added: Sequence[Tensor] = (),
    in_float32: bool,
) -> tuple[Tensor, Tensor]:
    """As `sum_choices`, and the RMS norm of the result with weight [H]; see `norm`."""
    return _launch_sum(outputs, indices, weight, eps, mine=mine, added=added, in_float32=in_float32)


def _launch_sum(
    outputs: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    mine: range,
    added: Sequence[Tensor],
    in_float32: bool,
) -> tuple[Tensor, Tensor]:
    (tokens, k), hidden = indices.shape, outputs.shape[1]
    out = outputs.new_empty(tokens, hidden)
    normed = out if weight is None else torch.empty_like(out)
    row = triton.next_power_of_2(hidden)
    block = row if weight is not None else min(_SUMMED, row)
    others = [*(other.contiguous() for other in added), out, out][:2]  # out: not used
    _sum_kernel[tokens, triton.cdiv(hidden, block)](
        outputs,
        indices,
        *others,
        out,
        normed,
        out if weight is None else weight,
        eps,
        mine.start,
        len(mine),
        hidden,
        K=k,
        BLOCK=block,
        ADDED=len(added),
        NORM=weight is not None,
        IN_FLOAT32=in_float32,
        num_warps=max(4, min(16, block // 512)),
    )
    return out, normed


def units_of(gated: bool) -> int:
    """Inner units of a program of up: with their gates they are as many rows of weights as without."""
    return _OUTPUTS // 2 if gated else _OUTPUTS


def tile_of(indices: Tensor, experts: int) -> dict[str, int]:
    """ROWS, SCANNED and BY_CHOICE of the products of choices [T, k], for X experts of this rank."""
    choices = indices.numel()
    each = triton.next_power_of_2(triton.cdiv(choices, experts))
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, each))
    scanned = min(_COMPARED // rows, max(_FEWEST_SCANNED, triton.next_power_of_2(choices)))
    return {"ROWS": rows, "SCANNED": scanned, "BY_CHOICE": choices <= min(experts, scanned)}


def _programs(indices: Tensor, experts: int, tile: dict[str, int]) -> int:
    """Those that look for an expert with choices."""
    return indices.numel() if tile["BY_CHOICE"] else experts
