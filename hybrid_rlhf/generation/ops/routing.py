"""The router of a mixture of experts on a GPU in one launch: product, scores and choice.

A program multiplies a few tokens by some rows of the router; the last of those with the same tokens chooses, which a
counter in memory tells it. The gate of a shared expert is one more row, behind those of the router. Products of
bfloat16 are summed in float32, which is exact but for the order. Where choices are equal, the expert with the lowest
index comes first. The reference is `RoutedExperts.route` (model/experts.py).

Shapes: T tokens, H hidden, E experts, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.generation.architecture.model_description import Experts
from hybrid_rlhf.generation.ops.triton_language import tl, triton

ROUTER_NUMBERS = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2, "sigmoid_of_chosen": 3, "sparsemixer": 4}
_TOKENS = 16
"""Of a program, the fewest that tensor cores multiply; and rows of the router."""
_STEP_BYTES = 512
"""Of a row, that are multiplied at once."""


@triton.jit
def _best(choice, place):
    """The largest value of each row, and the lowest place that has it."""
    best = tl.max(choice, 1)
    at = tl.where(choice == best[:, None], place[None, :], choice.shape[1])
    return best, tl.min(at, 1)


@triton.jit
def _in_best_groups(choice, place, E: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, SCORES: tl.constexpr):
    """Choices [n, E], -inf outside of the groups with the largest sum of their best scores."""
    group = tl.arange(0, triton.next_power_of_2(GROUPS))
    totals = tl.full([choice.shape[0], group.shape[0]], float("-inf"), tl.float32)
    for number in range(GROUPS):
        left = tl.where((place // (E // GROUPS) == number)[None, :], choice, float("-inf"))
        total = tl.zeros([choice.shape[0]], tl.float32)
        for _ in range(SCORES):
            best, at = _best(left, place)
            total += best
            left = tl.where(place[None, :] == at[:, None], float("-inf"), left)
        totals = tl.where(group[None, :] == number, total[:, None], totals)
    kept = tl.full(choice.shape, float("-inf"), tl.float32)
    for _ in range(CHOSEN):
        _, top = _best(totals, group)
        totals = tl.where(group[None, :] == top[:, None], float("-inf"), totals)
        kept = tl.where((place // (E // GROUPS))[None, :] == top[:, None], choice, kept)
    return kept


@triton.jit
def _choose(
    logits,
    row,
    correction,
    expert_scale,
    weights,
    indices,
    tokens,
    scale,
    near,
    E: tl.constexpr,
    K: tl.constexpr,
    ROUTER: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTION: tl.constexpr,
    SCALES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Choose and weigh experts of logits [n, E], which are -inf behind the last expert."""
    place, column = tl.arange(0, logits.shape[1]), tl.arange(0, triton.next_power_of_2(K))
    scores = logits
    if ROUTER == 0:
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    elif ROUTER == 1:
        scores = tl.sigmoid(logits)
    choice = scores
    if CORRECTION:
        choice += tl.load(correction + place, mask=place < E, other=0.0).to(tl.float32)[None, :]
    choice = tl.where((place < E)[None, :], choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, place, E, GROUPS, CHOSEN, SCORES)
    index = tl.zeros([logits.shape[0], column.shape[0]], tl.int32)
    chosen = tl.full([logits.shape[0], column.shape[0]], float("-inf"), tl.float32)
    for number in range(K):
        best, at = _best(choice, place)
        here = place[None, :] == at[:, None]
        weight = tl.sum(tl.where(here, scores, 0.0), 1)
        if ROUTER == 4:
            known = tl.where((place < E)[None, :], logits, 0.0)  # others have no choice
            far = best[:, None] - known > near * tl.maximum(tl.abs(known), best[:, None])
            weight = 1.0 / tl.sum(tl.where(far, 0.0, tl.exp(choice - best[:, None])), 1)
        choice = tl.where(here, float("-inf"), choice)
        index = tl.where(column[None, :] == number, tl.minimum(at, E - 1)[:, None], index)
        chosen = tl.where(column[None, :] == number, weight[:, None], chosen)
    if ROUTER == 2:
        chosen = tl.exp(chosen - tl.max(chosen, 1)[:, None])
        chosen = chosen / tl.sum(chosen, 1)[:, None]
    elif ROUTER == 3:
        chosen = tl.sigmoid(chosen)
    kept = (row < tokens)[:, None] & (column < K)[None, :]
    if NORMALISE:
        total = tl.sum(tl.where((column < K)[None, :], chosen, 0.0), 1)
        chosen = chosen / (total + (1e-20 if ROUTER == 1 else 0.0))[:, None]
    if SCALES:
        chosen *= tl.load(expert_scale + index).to(tl.float32)
    where = row[:, None] * K + column[None, :]
    tl.store(weights + where, chosen * scale, mask=kept)
    tl.store(indices + where, index, mask=kept)


@triton.jit
def _product(
    x,
    router,
    bias,
    gate,
    row,
    expert,
    real,
    known,
    hidden,
    stride,
    E: tl.constexpr,
    STEP: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
):
    """Logits of some tokens and experts, number E of which is the gate."""
    sums = tl.zeros([row.shape[0], expert.shape[0]], tl.float32)
    for start in range(0, hidden, STEP):
        place = start + tl.arange(0, STEP)
        inside = (place < hidden)[None, :]
        a = tl.load(x + row.to(tl.int64)[:, None] * stride + place[None, :], mask=real[:, None] & inside, other=0.0)
        b = tl.load(router + expert[:, None] * hidden + place[None, :], mask=known[:, None] & inside, other=0.0)
        if GATE:
            last = tl.load(gate + place, mask=place < hidden, other=0.0).to(b.dtype)
            b = tl.where((expert == E)[:, None], last[None, :], b)
        if x.dtype.element_ty != router.dtype.element_ty:
            a, b = a.to(tl.float32), b.to(tl.float32)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + expert, mask=known, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _store_gate(gates, logits, row, at, kept):
    """The sigmoid of the logits of one column."""
    tl.store(gates + row, tl.sigmoid(tl.sum(tl.where(at[None, :], logits, 0.0), 1)), mask=kept)


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    x,
    router,
    bias,
    correction,
    expert_scale,
    gate,
    logits,
    arrivals,
    weights,
    indices,
    gates,
    tokens,
    hidden,
    stride,
    scale,
    near,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    K: tl.constexpr,
    ROUTER: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTION: tl.constexpr,
    SCALES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Logits of some tokens and experts, and the gate; the last of the PARTS programs of these tokens chooses."""
    row, expert = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    real, known = row < tokens, expert < E
    sums = _product(x, router, bias, gate, row, expert, real, known, hidden, stride, E, STEP, BIAS, GATE)
    if GATE:
        _store_gate(gates, sums, row, expert == E, real & (tl.program_id(1) == PARTS - 1))
    last = True
    if PARTS > 1:
        tl.store(logits + row[:, None] * E + expert[None, :], sums, mask=real[:, None] & known[None, :])
        tl.debug_barrier()  # all threads have written before one of them counts
        last = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel") == PARTS - 1
    if last:
        each, whole = tl.arange(0, E_PAD)[None, :], sums
        if PARTS > 1:
            tl.store(arrivals + tl.program_id(0), 0)
            whole = tl.load(logits + row[:, None] * E + each, mask=real[:, None] & (each < E), other=0.0)
        whole = tl.where(each < E, whole, float("-inf"))
        _choose(
            whole,
            row,
            correction,
            expert_scale,
            weights,
            indices,
            tokens,
            scale,
            near,
            E,
            K,
            ROUTER,
            NORMALISE,
            CORRECTION,
            SCALES,
            GROUPS,
            CHOSEN,
            SCORES,
        )


def choose_experts(
    x: Tensor,
    router: Tensor,
    kind: Experts,
    arrivals: Tensor,
    *,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    expert_scale: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights [T, k] float32 and indices [T, k] int32 of the experts of tokens; weights [T] float32 of a shared one.

    Args:
        x: [T, H], rows contiguous.
        router: [E, H].
        kind: the routing.
        arrivals: int32 counters, one for each 16 tokens, 0 before and after; launches that overlap need their own.
        bias: [E] of the router, or none.
        correction: [E] or [1, E], added to the scores by which experts are chosen; or none.
        expert_scale: [E], by which weights are multiplied; or none.
        gate: [1, H], whose sigmoid weighs a shared expert; none: nothing does.
    """
    (tokens, hidden), experts, k = x.shape, len(router), kind.per_token
    constants = route_constants(kind, router.dtype, experts=experts, gate=gate is not None)
    parts = constants["PARTS"]
    weights = torch.empty(tokens, k, dtype=torch.float32, device=x.device)
    indices = torch.empty(tokens, k, dtype=torch.int32, device=x.device)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device) if parts > 1 else weights
    gates = None if gate is None else torch.empty(tokens, dtype=torch.float32, device=x.device)
    given = (x if other is None else other for other in (bias, correction, expert_scale, gate))  # x: not used
    _route_kernel[triton.cdiv(tokens, _TOKENS), parts](
        x,
        router,
        *given,
        logits,
        arrivals,
        weights,
        indices,
        weights if gates is None else gates,
        tokens,
        hidden,
        x.stride(0),
        kind.scale,
        kind.near,
        **constants,
        BIAS=bias is not None,
        CORRECTION=correction is not None and kind.router in ("softmax", "sigmoid"),
        SCALES=expert_scale is not None and kind.router in ("softmax", "sigmoid"),
    )
    return weights, indices, gates


def route_constants(kind: Experts, dtype: torch.dtype, *, experts: int, gate: bool) -> dict[str, int]:
    """What `_route_kernel` is compiled for."""
    of_all = kind.router in ("softmax", "sigmoid")
    return {
        "E": experts,
        "E_PAD": max(_TOKENS, triton.next_power_of_2(experts)),
        "PARTS": triton.cdiv(experts + gate, _TOKENS),
        "GATE": gate,
        "TOKENS": _TOKENS,
        "STEP": _STEP_BYTES // dtype.itemsize,
        "K": kind.per_token,
        "ROUTER": ROUTER_NUMBERS[kind.router],
        "NORMALISE": kind.normalise and of_all,
        "GROUPS": kind.groups if of_all else 1,
        "CHOSEN": kind.chosen_groups,
        "SCORES": kind.group_scores,
    }
