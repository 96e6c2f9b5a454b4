"""Choice of the experts of each token from the logits of a router, in one launch.

Among experts with equal scores, the one with the lowest index comes first. `route` is the reference.

Shapes: T tokens, H hidden, E experts, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.functional.triton_language import tl, triton
from hybrid_rlhf.generation.architecture.model_description import Experts

ROUTER_NUMBERS = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2, "sigmoid_of_chosen": 3, "sparsemixer": 4}
_TOKENS = 4
"""Number of tokens per program."""


def route(
    logits: Tensor, kind: Experts, *, correction: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `choose_experts`."""
    if kind.router == "sparsemixer":
        return _sparsemixer(logits, kind)
    if kind.router in ("softmax_of_chosen", "sigmoid_of_chosen"):
        chosen, index = logits.topk(kind.per_token, dim=-1)
        weights = chosen.softmax(dim=-1) if kind.router == "softmax_of_chosen" else chosen.sigmoid()
        return weights * kind.scale, index
    scores = logits.softmax(dim=-1) if kind.router == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if kind.groups > 1:
        choice = choice.masked_fill(~_best_groups(choice, kind), -torch.inf)
    index = choice.topk(kind.per_token, dim=-1)[1]
    weights = scores.gather(1, index)
    if kind.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + (1e-20 if kind.router == "sigmoid" else 0.0))
    if expert_scale is not None:
        weights = weights * expert_scale.float()[index]
    return weights * kind.scale, index


def _sparsemixer(logits: Tensor, kind: Experts) -> tuple[Tensor, Tensor]:
    """Choose experts as SparseMixer: each is the best remaining one, and is weighed only against experts near it."""
    weights = []
    index = []
    left = logits
    for _ in range(kind.per_token):
        best, place = left.max(dim=-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > kind.near
        weights.append(left.masked_fill(far, -torch.inf).softmax(dim=-1).gather(1, place))
        index.append(place)
        left = left.scatter(1, place, -torch.inf)
    return torch.cat(weights, dim=1), torch.cat(index, dim=1)


def _best_groups(choice: Tensor, kind: Experts) -> Tensor:
    """Return [T, E] bool, true for experts in the groups with the largest sums of their best scores."""
    grouped = choice.unflatten(1, (kind.groups, -1))
    best = grouped.topk(kind.group_scores, dim=-1)[0].sum(dim=-1).topk(kind.chosen_groups, dim=-1)[1]
    mask = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, True)
    return mask[:, :, None].expand_as(grouped).flatten(1)


@triton.jit
def _best(choice, place):
    """Largest value of each row, and the lowest index that has it."""
    best = tl.max(choice, 1)
    at = tl.where(choice == best[:, None], place[None, :], choice.shape[1])
    return best, tl.min(at, 1)


@triton.jit
def _in_best_groups(choice, place, E: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, SCORES: tl.constexpr):
    """Choices [n, E], set to -inf outside the groups with the largest sums of their best scores."""
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
    allowed = tl.full(choice.shape, float("-inf"), tl.float32)
    for _ in range(CHOSEN):
        _, top = _best(totals, group)
        totals = tl.where(group[None, :] == top[:, None], float("-inf"), totals)
        allowed = tl.where((place // (E // GROUPS))[None, :] == top[:, None], choice, allowed)
    return allowed


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    logits,
    correction,
    expert_scale,
    weights,
    indices,
    tokens,
    scale,
    near,
    TOKENS: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    K: tl.constexpr,
    ROUTER: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTION: tl.constexpr,
    SCALES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Choose and weigh the experts of some tokens."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.arange(0, E_PAD)
    column = tl.arange(0, triton.next_power_of_2(K))
    source = logits + row.to(tl.int64)[:, None] * E + place[None, :]
    logits = tl.load(source, mask=(row < tokens)[:, None] & (place < E)[None, :], other=float("-inf"))
    logits = tl.where((row < tokens)[:, None], logits, 0.0)  # a row of -inf would have no largest value
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
            known = tl.where((place < E)[None, :], logits, 0.0)  # padding is never chosen
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
    inside = (row < tokens)[:, None] & (column < K)[None, :]
    if NORMALISE:
        total = tl.sum(tl.where((column < K)[None, :], chosen, 0.0), 1)
        chosen = chosen / (total + (1e-20 if ROUTER == 1 else 0.0))[:, None]
    if SCALES:
        chosen *= tl.load(expert_scale + index).to(tl.float32)
    where = row[:, None] * K + column[None, :]
    tl.store(weights + where, chosen * scale, mask=inside)
    tl.store(indices + where, index, mask=inside)


def choose_experts(
    logits: Tensor, kind: Experts, *, correction: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights [T, k] float32 and indices [T, k] int32 of the experts of tokens.

    Args:
        logits: [T, E] float32 router logits.
        kind: type of routing.
        correction: [E] or [1, E], added to the scores by which experts are chosen; or none.
        expert_scale: [E], factors of the weights; or none.
    """
    tokens, experts = logits.shape
    weights = torch.empty(tokens, kind.per_token, dtype=torch.float32, device=logits.device)
    indices = torch.empty(tokens, kind.per_token, dtype=torch.int32, device=logits.device)
    of_all = kind.router in ("softmax", "sigmoid")
    _choose_kernel[(triton.cdiv(tokens, _TOKENS),)](
        logits,
        logits if correction is None else correction,
        logits if expert_scale is None else expert_scale,
        weights,
        indices,
        tokens,
        kind.scale,
        kind.near,
        **choice_constants(kind, experts),
        CORRECTION=correction is not None and of_all,
        SCALES=expert_scale is not None and of_all,
    )
    return weights, indices


def choice_constants(kind: Experts, experts: int) -> dict[str, int]:
    """Return compile-time constants of `_choose_kernel`."""
    of_all = kind.router in ("softmax", "sigmoid")
    return {
        "TOKENS": _TOKENS,
        "E": experts,
        "E_PAD": triton.next_power_of_2(experts),
        "K": kind.per_token,
        "ROUTER": ROUTER_NUMBERS[kind.router],
        "NORMALISE": kind.normalise and of_all,
        "GROUPS": kind.groups if of_all else 1,
        "CHOSEN": kind.chosen_groups,
        "SCORES": kind.group_scores,
    }
