"""Experts of a mixture: up with the activation, and down.

For few tokens, Triton kernels need two launches, before torch sums over a token's choices. A program computes some
outputs of one expert. It searches the choices of all tokens for those of its expert, so that no launch sorts them and
no shape depends on the routing, as a CUDA graph requires. There is a program for every expert of this rank, or, if
there are fewer choices than experts, for every choice; then only the program of an expert's first choice works. The
launches write a separate row for each choice, so that the sum over a token's choices has a fixed order. Sums are
float32; intermediate rows are rounded to the model's dtype. The reference is the grouped product of `RoutedExperts`
(model/experts.py), which larger steps on a GPU also use.

Shapes: T tokens, H hidden, X experts of this rank, k experts per token, C = T k choices, I inner units.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.functional.triton_language import tl, triton
from hybrid_rlhf.generation.architecture.model_description import Activation
from hybrid_rlhf.generation.ops.rows import ACTIVATION_NUMBERS, activated

_OUTPUTS = 64
"""Number of weight rows per tile; if gated, half of them are gates."""
_STEP_BYTES = 128
"""Bytes of a weight row that are multiplied at once."""
_STAGES = 4
"""Number of pipeline stages of tiles in shared memory."""
CLAMPED = -1
"""Activation number of the clamped SwiGLU of gpt-oss."""
_FEWEST_ROWS = 16
"""Minimum number of rows per tile, as tensor cores require."""
_MOST_ROWS = 64
"""Maximum number of rows per tile."""
_COMPARED = 8192
"""Rows times choices that are compared at once to find an expert's choices."""
_FEWEST_SCANNED = 128
"""Minimum number of choices that are compared at once, so that few variants of kernels are compiled."""


@triton.jit
def expert_of(indices, first_expert, experts, BY_CHOICE: tl.constexpr, SCANNED: tl.constexpr):
    """Index of this program's expert on its rank; -1 if it has none."""
    expert = tl.program_id(0)
    if BY_CHOICE:
        place = tl.arange(0, SCANNED)
        wanted = tl.load(indices + tl.program_id(0))
        earlier_experts = tl.load(indices + place, mask=place < tl.program_id(0), other=-1)
        earlier = tl.max(tl.where(earlier_experts == wanted, 1, 0), 0)
        expert = wanted - first_expert
        expert = tl.where((earlier == 0) & (expert >= 0) & (expert < experts), expert, -1)
    return expert


@triton.jit
def choices_of(indices, wanted, choices, start, ROWS: tl.constexpr, SCANNED: tl.constexpr):
    """Choices start to start + ROWS - 1 of an expert, -1 after its last one; and the total number of its choices."""
    number = start + tl.arange(0, ROWS)
    selected = tl.full([ROWS], -1, tl.int32)
    count = 0
    for begin in range(0, choices, SCANNED):
        choice = begin + tl.arange(0, SCANNED)
        is_wanted = tl.load(indices + choice, mask=choice < choices, other=-1) == wanted
        ones = is_wanted.to(tl.int32)
        at = tl.where(is_wanted, count + tl.cumsum(ones, 0) - 1, -1)
        here = tl.where(at[None, :] == number[:, None], choice[None, :], -1)
        selected = tl.maximum(selected, tl.max(here, 1))
        count += tl.sum(ones, 0)
    return selected, count


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
    """Products [n, m] of rows at source [n, 1] with rows at weights [1, m] and, if gated, with the rows `behind` later.

    Rows have `inputs` elements; `length` is that number, or 0 to skip the products. With WEIGHS, the source is
    multiplied by factors [n].
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
        inside_weights = known[None, :] & inside[:, None]
        first = tl.dot(a, tl.load(where, mask=inside_weights, other=0.0), first, input_precision="ieee")
        if GATED:
            second = tl.dot(a, tl.load(where + behind, mask=inside_weights, other=0.0), second, input_precision="ieee")
    return first, second


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
    """Compute some inner units [C, I] for the choices of one expert: act(up), or act(gate) times up."""
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    known = unit < units
    expert = expert_of(indices, first_expert, experts, BY_CHOICE, SCANNED)
    rows = up + expert.to(tl.int64) * expert_stride + unit.to(tl.int64)[None, :] * row_stride
    behind = units.to(tl.int64) * row_stride
    start = 0
    count = tl.where(expert < 0, 0, 1)
    while start < count:
        choice, count = choices_of(indices, expert + first_expert, choices, start, ROWS, SCANNED)
        real = choice >= 0
        source = x + (choice // per_token).to(tl.int64)[:, None] * x_stride
        length = tl.where(start < count, hidden, 0)
        first, second = products(
            source, rows, real, known, hidden, length, column_stride, behind, STEP, GATED, weights + choice, WEIGHS
        )
        if BIAS:
            biases = bias + expert * bias_stride + unit
            first += tl.load(biases, mask=known, other=0.0).to(tl.float32)[None, :]
            if GATED:
                second += tl.load(biases + units, mask=known, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == -1:  # CLAMPED
            gate = tl.minimum(first, limit)
            result = (tl.minimum(tl.maximum(second, -limit), limit) + 1.0) * gate * tl.sigmoid(1.702 * gate)
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
    """Compute some outputs [C, H] for the choices of one expert, times their weights."""
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < hidden
    expert = expert_of(indices, first_expert, experts, BY_CHOICE, SCANNED)
    rows = down + expert.to(tl.int64) * expert_stride + output.to(tl.int64)[None, :] * row_stride
    start = 0
    count = tl.where(expert < 0, 0, 1)
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
) -> Tensor:
    """Return inner units [C, I] of each choice. Rows of other ranks' experts are uninitialised.

    Args:
        x: [T, H], rows contiguous.
        weights: [T, k] float32.
        indices: [T, k] int32.
        up: [X, 2 I, H], gate and up, or up alone [X, I, H]; any strides.
        bias: [X, 2 I] or [X, I], or none.
        mine: the experts of this rank.
        inner: I.
        activation: activation of the gate, or of up without a gate.
        clamp: limit of the clamped SwiGLU of gpt-oss, which replaces the activation; none: no clamp.
        weighs_inputs: the weights multiply the inputs.
    """
    gated = up.shape[1] == 2 * inner
    tile = tile_of(indices, len(mine))
    units = units_of(gated)
    out = x.new_empty(indices.numel(), inner)
    _up_kernel[programs_of(indices, len(mine), tile), triton.cdiv(inner, units)](
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
        ACTIVATION=ACTIVATION_NUMBERS[activation] if clamp is None else CLAMPED,
        BIAS=bias is not None,
        WEIGHS=weighs_inputs,
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
) -> Tensor:
    """Return outputs [C, H] of each choice. Rows of other ranks' experts are uninitialised.

    Args:
        inner: [C, I] from `experts_up`.
        weights: [T, k] float32, factors of the outputs; none: no factors.
        indices: [T, k] int32.
        down: [X, H, I], any strides.
        bias: [X, H], or none.
        mine: the experts of this rank.
    """
    hidden = down.shape[1]
    tile = tile_of(indices, len(mine))
    out = inner.new_empty(len(inner), hidden)
    _down_kernel[programs_of(indices, len(mine), tile), triton.cdiv(hidden, _OUTPUTS)](
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


def units_of(gated: bool) -> int:
    """Number of inner units per program of `experts_up`, so that weight rows with gates are as many as without."""
    return _OUTPUTS // 2 if gated else _OUTPUTS


def tile_of(indices: Tensor, experts: int) -> dict[str, int]:
    """Return ROWS, SCANNED and BY_CHOICE of the kernels, for choices [T, k] and `experts` experts on this rank."""
    choices = indices.numel()
    per_expert = triton.next_power_of_2(triton.cdiv(choices, experts))
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, per_expert))
    scanned = min(_COMPARED // rows, max(_FEWEST_SCANNED, triton.next_power_of_2(choices)))
    return {"ROWS": rows, "SCANNED": scanned, "BY_CHOICE": choices <= min(experts, scanned)}


def programs_of(indices: Tensor, experts: int, tile: dict[str, int]) -> int:
    """Number of programs along the first axis: one per choice or per expert."""
    return indices.numel() if tile["BY_CHOICE"] else experts
