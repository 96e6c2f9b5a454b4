"""Linear recurrences, one token or many at once.

DECAYING_SCAN has a matrix per head as its state, which decays by a scalar. The state S of a head maps keys to values:
S <- exp(g) S + k v^T, with output S^T q. With the delta rule, what S already has for a key is subtracted from the value
first: v <- beta (v - exp(g) S^T k). Within a block of tokens all outputs follow from products of queries and keys,
weighted by the decay between two tokens; the delta rule adds a triangular system. Between blocks only the state is
passed on.

A selective scan has a vector per channel, each element of which decays at a rate of its own. Its blocks run twice: from
zero, for what each adds to the state, and from the state that it then has before it.

Source: Mamba-2 (arXiv 2405.21060, section 6) and, for the delta rule, DeltaNet (arXiv 2406.06484, section 3) and its
gated form (arXiv 2412.06464, section 3.3); selective scan: Mamba (arXiv 2312.00752, section 3.2).

Shapes: B rows, N blocks of L tokens, G groups of r heads that share queries and keys [.., G, K]; values [.., G, r, V],
decays and betas [.., G, r], states [.., G, K, r, V].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hybrid_rlhf.generation.model.recurrent.states import Rule


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
    """[B, G, r, V]."""
    state.mul_(g.exp()[:, :, None, :, None])
    heads = state.flatten(0, 1).flatten(2)
    if beta is not None:
        known = torch.bmm(k.flatten(0, 1)[:, None], heads).view_as(v)
        v = (v - known) * beta[..., None]
    heads.baddbmm_(k.flatten(0, 1)[:, :, None], v.flatten(0, 1).flatten(1)[:, None])
    return torch.bmm(q.flatten(0, 1)[:, None], heads).view_as(v)


def _blocks(
    state: Tensor,
    rounds: Sequence[slice],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
) -> Tensor:
    """[N, L, G, r, V]."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)  # [N, G, L, K]
    v, g = v.permute(0, 2, 3, 1, 4), g.permute(0, 2, 3, 1).cumsum(dim=-1)  # [N, G, r, L, V] and [N, G, r, L]
    later = torch.ones(v.shape[3], v.shape[3], dtype=torch.bool, device=v.device).triu(1)
    between = (g[..., :, None] - g[..., None, :]).masked_fill(later, -torch.inf).exp()
    scores = (q @ k.transpose(2, 3))[:, :, None] * between
    known = None
    if beta is not None:
        beta = beta.permute(0, 2, 3, 1)[..., None]
        system = (k @ k.transpose(2, 3))[:, :, None] * between * beta
        both = torch.cat([v * beta, k[:, :, None] * (beta * g.exp()[..., None])], dim=-1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        v, known = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    decay, left = g.exp()[..., None], (g[..., -1:] - g).exp()[..., None]
    out = torch.empty_like(v)
    for part in rounds:
        before = state[: part.stop - part.start]
        new = v[part] if known is None else v[part] - known[part] @ before.transpose(2, 3)
        read = (q[part] @ before.flatten(3)).unflatten(-1, before.shape[3:]).transpose(2, 3)
        out[part] = decay[part] * read + scores[part] @ new
        written = k[part].transpose(2, 3) @ (left[part] * new).transpose(2, 3).flatten(3)
        before.mul_(decay[part][:, :, None, :, -1]).add_(written.unflatten(-1, before.shape[3:]))
    return out.permute(0, 3, 1, 2, 4)


DECAYING_SCAN = Rule(_step, _blocks)
"""With the inputs q, k, v, g, and beta for the delta rule."""


def selective_scan(rates: Tensor) -> Rule:
    """With the inputs x dt [.., C], dt [.., C], B and C [.., K]: S <- exp(dt rates) S + x dt B^T, with output S C.

    The rates are [C, K], as is a state.
    """
    return Rule(partial(_selective_step, rates), partial(_selective_blocks, rates))


def _selective_step(rates: Tensor, state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """[B, C]."""
    state.mul_((dt[..., None] * rates).exp_()).baddbmm_(x[..., None], b[:, None])
    return torch.bmm(state, c[..., None]).squeeze(-1)


def _selective_blocks(
    rates: Tensor, state: Tensor, rounds: Sequence[slice], x: Tensor, dt: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    """[N, L, C]."""
    added = x.new_zeros(len(x), *rates.shape)
    for token in range(x.shape[1]):
        _selective_step(rates, added, x[:, token], dt[:, token], b[:, token], c[:, token])
    decay, before = (dt.sum(dim=1)[..., None] * rates).exp(), torch.empty_like(added)
    for part in rounds:
        own = state[: part.stop - part.start]
        before[part] = own
        own.mul_(decay[part]).add_(added[part])
    tokens = zip(*(part.unbind(dim=1) for part in (x, dt, b, c)), strict=True)
    return torch.stack([_selective_step(rates, before, *token) for token in tokens], dim=1)
