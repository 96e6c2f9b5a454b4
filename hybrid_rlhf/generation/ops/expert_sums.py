"""The sum over the chosen experts of a decoding step on a GPU, with what is added to it and the norm of all.

The order of the sum is fixed: a token's routed choices, then the parts of the shared expert (experts.py), what else
belongs to the layer, and the residual stream.

Shapes: T tokens, H hidden, k experts per token, C = T k choices, S parts of the shared expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_rlhf.generation.ops.norms import rms_normed
from hybrid_rlhf.generation.ops.triton_language import tl, triton

_SUMMED = 1024
"""Of a row, that a program sums where it does not norm all of it."""


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
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    NORM: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """A block of a row of the sum over a token's choices of this rank, the shared expert, and what is added to it; or
    the whole row, and its RMS norm."""
    token, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < hidden
    dtype = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(K):
        choice = token * K + number
        expert = tl.load(indices + choice) - first_expert
        own = (expert >= 0) & (expert < experts)
        total += tl.load(outputs + choice * hidden + place, mask=inside & own, other=0.0).to(tl.float32)
    for number in tl.static_range(K, K + PARTS):
        row = tl.num_programs(0) * number + token
        total += tl.load(outputs + row * hidden + place, mask=inside, other=0.0).to(tl.float32)
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


def sum_choices(outputs: Tensor, indices: Tensor, *, mine: range, added: Sequence[Tensor] = ()) -> Tensor:
    """[T, H], the sum of each token's outputs [C + S T, H] of this rank's experts, plus at most two [T, H]."""
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
        PARTS=len(outputs) // tokens - k,
        BLOCK=block,
        ADDED=len(added),
        NORM=weight is not None,
        IN_FLOAT32=in_float32,
        num_warps=max(4, min(16, block // 512)),
    )
    return out, normed
