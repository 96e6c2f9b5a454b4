"""The chosen experts of a decoding step on a GPU in two launches: up with the activation, and down.

A program has some outputs of one expert. It finds the choices of its expert itself, among those of all tokens, so that
no launch sorts them and no shape depends on the routing, as a CUDA graph requires: there is a program for every expert
of this rank or, where there are fewer choices than experts, for every choice, of which the first of an expert works.
Each choice has a row of its own in what the launches give, so that the sum over a token's choices (expert_sums.py) has
a fixed order. Sums are float32; the rows in between are rounded to the model's dtype. The reference is the grouped
product of `RoutedExperts` (model/experts.py), which larger steps use on a GPU too.

A shared expert is computed in the same launches. Its units are split into S parts as large as a routed expert, the last
of which may be smaller. Each part has programs of its own and a row for each token, behind the rows of the choices.

Shapes: T tokens, H hidden, X experts of this rank, k experts per token, C = T k choices, I inner units, J units of the
shared expert, S = ceil(J / I) parts of it.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.generation.architecture.model_description import Activation
from hybrid_rlhf.generation.ops.expert_tiles import (
    CLAMPED,
    biased,
    choices_of,
    expert_of,
    inner_units_of,
    products,
    programs_of,
    shared_arguments,
    shared_tile,
    tile_of,
)
from hybrid_rlhf.generation.ops.rows import ACTIVATION_NUMBERS
from hybrid_rlhf.generation.ops.triton_language import tl, triton

_OUTPUTS = 64
"""Rows of weights in a tile; of up and gate half of them are gates."""
_STEP_BYTES, _STAGES = 128, 4
"""Of such a row, that are multiplied at once; and how many times a tile and that of the inputs are in shared memory."""


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
    shared,
    shared_units,
    shared_row_stride,
    shared_column_stride,
    ROWS: tl.constexpr,
    SCANNED: tl.constexpr,
    UNITS: tl.constexpr,
    STEP: tl.constexpr,
    BY_CHOICE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Some inner units [C + S T, I] of the choices of one expert, or of some tokens for a part of the shared expert:
    the activation of up, or that of the gate times up."""
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    known = unit < units
    routed = choices if BY_CHOICE else experts
    if SHARED and tl.program_id(0) >= routed:
        tokens = choices // per_token
        part, token = shared_tile(tl.program_id(0) - routed, tokens, ROWS)
        before, real = part * units, token < tokens
        known &= before + unit < shared_units
        source = x + token.to(tl.int64)[:, None] * x_stride
        rows = shared + (before + unit).to(tl.int64)[None, :] * shared_row_stride
        behind = shared_units.to(tl.int64) * shared_row_stride
        length = tl.where(before + tl.program_id(1) * UNITS < shared_units, hidden, 0)
        first, second = products(source, rows, real, known, hidden, length, shared_column_stride, behind, STEP, GATED)
        result = inner_units_of(first, second, limit, GATED, ACTIVATION)
        target = inner_units + (choices + part * tokens + token).to(tl.int64)[:, None] * units + unit[None, :]
        tl.store(target, result, mask=real[:, None] & known[None, :])
    else:
        expert = expert_of(indices, first_expert, experts, BY_CHOICE, SCANNED)
        rows = up + expert.to(tl.int64) * expert_stride + unit.to(tl.int64)[None, :] * row_stride
        behind = units.to(tl.int64) * row_stride
        start, count = 0, tl.where(expert < 0, 0, 1)
        while start < count:
            choice, count = choices_of(indices, expert + first_expert, choices, start, ROWS, SCANNED)
            real = choice >= 0
            source = x + (choice // per_token).to(tl.int64)[:, None] * x_stride
            length = tl.where(start < count, hidden, 0)
            first, second = products(
                source, rows, real, known, hidden, length, column_stride, behind, STEP, GATED, weights + choice, WEIGHS
            )
            if BIAS:
                first, second = biased(first, second, bias + expert * bias_stride + unit, known, units, GATED)
            result = inner_units_of(first, second, limit, GATED, ACTIVATION)
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
    per_token,
    gates,
    shared,
    shared_units,
    shared_row_stride,
    shared_column_stride,
    ROWS: tl.constexpr,
    SCANNED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    BY_CHOICE: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    SHARED: tl.constexpr,
    GATE: tl.constexpr,
):
    """Some outputs [C + S T, H] of the choices of one expert, times their weights, or of some tokens for a part of the
    shared expert, times their gates."""
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < hidden
    routed = choices if BY_CHOICE else experts
    if SHARED and tl.program_id(0) >= routed:
        tokens = choices // per_token
        part, token = shared_tile(tl.program_id(0) - routed, tokens, ROWS)
        before, real, row = part * units, token < tokens, (choices + part * tokens + token).to(tl.int64)[:, None]
        own = shared + before.to(tl.int64) * shared_column_stride
        rows = own + output.to(tl.int64)[None, :] * shared_row_stride
        length = tl.where(before + units < shared_units, units, shared_units - before)
        source = inner_units + row * units
        sums, _ = products(source, rows, real, known, length, length, shared_column_stride, 0, STEP)
        if GATE:
            sums *= tl.load(gates + token, mask=real, other=0.0)[:, None]
        tl.store(out + row * hidden + output[None, :], sums, mask=real[:, None] & known[None, :])
    else:
        expert = expert_of(indices, first_expert, experts, BY_CHOICE, SCANNED)
        rows = down + expert.to(tl.int64) * expert_stride + output.to(tl.int64)[None, :] * row_stride
        start, count = 0, tl.where(expert < 0, 0, 1)
        while start < count:
            choice, count = choices_of(indices, expert + first_expert, choices, start, ROWS, SCANNED)
            real = choice >= 0
            source = inner_units + choice.to(tl.int64)[:, None] * units
            length = tl.where(start < count, units, 0)
            sums, _ = products(source, rows, real, known, units, length, column_stride, 0, STEP)
            if BIAS:
                sums += tl.load(bias + expert * bias_stride + output, mask=known, other=0.0).to(tl.float32)[None, :]
            if WEIGHS:
                factor = tl.load(weights + choice, mask=real, other=0.0)
                sums *= factor.to(out.dtype.element_ty).to(tl.float32)[:, None]
            target = out + choice.to(tl.int64)[:, None] * hidden + output[None, :]
            tl.store(target, sums, mask=real[:, None] & known[None, :])
            start += ROWS


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
    shared: Tensor | None = None,
) -> Tensor:
    """Inner units [C + S T, I] of each choice, and of each token for each part of the shared expert.

    Those of choices that are other ranks' are unset.

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
        shared: [2 J, H] or [J, H] of the shared expert, gated as the others are; of any strides; or none.
    """
    gated = up.shape[1] == 2 * inner
    tile = tile_of(indices, len(mine))
    units = units_of(gated)
    shared_units = 0 if shared is None else len(shared) // (2 if gated else 1)
    out = x.new_empty(indices.numel() + triton.cdiv(shared_units, inner) * len(x), inner)
    _up_kernel[programs_of(indices, len(mine), tile, rows=len(out)), triton.cdiv(inner, units)](
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
        *shared_arguments(shared, up, shared_units),
        **tile,
        UNITS=units,
        STEP=_STEP_BYTES // x.element_size(),
        GATED=gated,
        ACTIVATION=ACTIVATION_NUMBERS[activation] if clamp is None else CLAMPED,
        BIAS=bias is not None,
        WEIGHS=weighs_inputs,
        SHARED=shared is not None,
        num_stages=_STAGES,
    )
    return out


def experts_down(
    inner: Tensor,
    weights: Tensor | None,
    indices: Tensor,
    down: Tensor,
    bias: Tensor | None,
    *,
    mine: range,
    shared: Tensor | None = None,
    gates: Tensor | None = None,
) -> Tensor:
    """Outputs [C + S T, H] of each row of `inner`; those of choices that are other ranks' are unset.

    Args:
        inner: [C + S T, I] of `experts_up`.
        weights: [T, k] float32 that multiply what comes out; none: they do not.
        indices: [T, k] int32.
        down: [X, H, I], of any strides.
        bias: [X, H], or none.
        mine: the experts of this rank.
        shared: [H, J] of the shared expert, of any strides; or none.
        gates: [T] float32 that multiply what comes out of it; or none.
    """
    hidden, tile = down.shape[1], tile_of(indices, len(mine))
    out = inner.new_empty(len(inner), hidden)
    _down_kernel[programs_of(indices, len(mine), tile, rows=len(out)), triton.cdiv(hidden, _OUTPUTS)](
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
        indices.shape[1],
        inner if gates is None else gates,
        *shared_arguments(shared, down, 0 if shared is None else shared.shape[1]),
        **tile,
        OUTPUTS=_OUTPUTS,
        STEP=_STEP_BYTES // inner.element_size(),
        BIAS=bias is not None,
        WEIGHS=weights is not None,
        SHARED=shared is not None,
        GATE=gates is not None,
        num_stages=_STAGES,
    )
    return out


def units_of(gated: bool) -> int:
    """Inner units of a program of up: with their gates they are as many rows of weights as without."""
    return _OUTPUTS // 2 if gated else _OUTPUTS
