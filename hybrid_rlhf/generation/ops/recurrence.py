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

On a GPU a kernel takes a step of a gated delta net or of Mamba-2, and reads and writes the states where they lie,
through the slots of the rows. What the recurrence makes of its inputs first (vectors of unit length, step sizes,
decays) is part of the kernel. All arithmetic is float32; the references round intermediate results to the dtype of the
model. Chunks are products on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybrid_rlhf.generation.ops.triton_language import tl, triton

_TILE_SIZE = 4096
"""Elements of a state that a program of a decaying scan holds."""
_DELTA, _MAMBA2 = tl.constexpr(0), tl.constexpr(1)


def _as_given(*tokens: Tensor) -> tuple[Tensor, ...]:
    return tokens


@dataclass(frozen=True)
class Rule:
    """A recurrence, over inputs in float32."""

    step: Callable[..., Tensor]
    """Outputs [B, ...] of states [B, ...] and inputs [B, ...] of one token of each row; updates the states."""
    blocks: Callable[..., Tensor]
    """Outputs [N, L, ...] of states [n, ...], rounds and inputs [N, L, ...]; updates the states.

    Round i is the slice with the i-th blocks of the first sequences. Inputs are zero behind the end of a sequence,
    which must leave its state as it is."""
    inputs: Callable[..., tuple[Tensor, ...]] = _as_given
    """Inputs of what a layer has for some tokens."""
    skip: Callable[..., Tensor] | None = None
    """What is added to the outputs, of the same."""
    kernel: Callable[..., Tensor] | None = None
    """Outputs [B, ...] of the states of all slots, the slots [B], and what a layer has for one token of each row;
    updates the states. It computes inputs and skip itself, and is used if the states of a step have kernels."""


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


def selective_rule(rates: Tensor) -> Rule:
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


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact to rounding for small exp(x) too."""
    e = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0))))


@triton.jit
def _unit(x):
    """A vector divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _decaying_step_kernel(
    q,
    k,
    v,
    steps,
    betas,
    decay,
    dt,
    skip,
    states,
    slots,
    out,
    scale,
    least_step,
    token_stride,
    gate_stride,
    groups,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KIND: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token of a head of a row, for a block of the values: S <- exp(g) S + k v^T, with output S^T q."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, key = head // R, tl.arange(0, K_PAD)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = key < K, value < V
    queries = tl.load(q + row * token_stride + group * K + key, mask=is_key, other=0.0).to(tl.float32)
    keys = tl.load(k + row * token_stride + group * K + key, mask=is_key, other=0.0).to(tl.float32)
    given = tl.load(v + row * token_stride + head * V + value, mask=is_value, other=0.0).to(tl.float32)
    rate = tl.load(decay + head).to(tl.float32)
    step = _softplus(tl.load(steps + row * gate_stride + head).to(tl.float32) + tl.load(dt + head).to(tl.float32))
    step = tl.maximum(step, least_step)
    faded = tl.exp(-tl.exp(rate) * step)
    values = given * step if KIND == _MAMBA2 else given
    if KIND == _DELTA:
        queries, keys = _unit(queries) * scale, _unit(keys)
    where = (group * K + key)[:, None] * (R * V) + (head % R * V + value)[None, :]
    state = states + tl.load(slots + row).to(tl.int64) * groups * (K * R * V) + where
    kept = is_key[:, None] & is_value[None, :]
    memory = tl.load(state, mask=kept, other=0.0) * faded
    if KIND == _DELTA:
        beta = tl.sigmoid(tl.load(betas + row * gate_stride + head).to(tl.float32))
        values = (values - tl.sum(memory * keys[:, None], 0)) * beta
    memory += keys[:, None] * values[None, :]
    tl.store(state, memory, mask=kept)
    read = tl.sum(memory * queries[:, None], 0)
    if KIND == _MAMBA2:
        read += given * tl.load(skip + head).to(tl.float32)
    tl.store(out + (row * groups * R + head) * V + value, read, mask=is_value)


def values_at_once(k_pad: int, v: int) -> int:
    """Values of a tile of a head's state [K, V], of which K is padded."""
    return min(triton.next_power_of_2(v), max(8, _TILE_SIZE // k_pad))


def delta_step(decay: Tensor, dt: Tensor, states: Tensor, slots: Tensor, mixed: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """A token of each row in a gated delta net.

    Args:
        decay: [G r] logarithms of rates.
        dt: [G r] biases of step sizes.
        states: [slots, G, K, r, V]; updated.
        slots: [B].
        mixed: queries, keys and values [B, 2 G K + G r V].
        b: [B, G r] before the sigmoid, whose rows may be parts of longer ones.
        a: step sizes, alike, before bias and softplus.

    Returns:
        [B, G, r, V] float32.
    """
    _, groups, k, _, _ = states.shape
    parts = mixed, mixed[:, groups * k :], mixed[:, 2 * groups * k :]
    return _decaying_step(_DELTA, parts, decay, states, slots, gates=(a, b), dt=dt)


def mamba2_step(
    decay: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    slots: Tensor,
    mixed: Tensor,
    dt: Tensor,
    *,
    least_step: float,
) -> Tensor:
    """A token of each row in a Mamba-2 mixer.

    Args:
        decay: [G r] logarithms of rates.
        dt_bias: [G r].
        skip: [G r].
        states: [slots, G, K, r, V]; updated.
        slots: [B].
        mixed: inputs, B and C [B, G r V + 2 G K].
        dt: [B, G r], whose rows may be parts of longer ones.
        least_step: the smallest step size.

    Returns:
        [B, G, r, V] float32.
    """
    _, groups, k, shared, v = states.shape
    inner, gates = groups * shared * v, (dt, dt)
    parts = mixed[:, inner + groups * k :], mixed[:, inner:], mixed
    return _decaying_step(
        _MAMBA2, parts, decay, states, slots, gates=gates, dt=dt_bias, skip=skip, least_step=least_step
    )


def _decaying_step(
    kind: tl.constexpr,
    parts: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    states: Tensor,
    slots: Tensor,
    *,
    gates: tuple[Tensor, Tensor],
    dt: Tensor,
    skip: Tensor | None = None,
    least_step: float = 0.0,
) -> Tensor:
    """`parts`: queries, keys and values; `gates`: step sizes and betas."""
    _, groups, k, shared, v = states.shape
    rows, k_pad = len(slots), triton.next_power_of_2(k)
    block = values_at_once(k_pad, v)
    out = torch.empty(rows, groups, shared, v, dtype=torch.float32, device=states.device)
    steps, betas = gates
    _decaying_step_kernel[rows, groups * shared, triton.cdiv(v, block)](
        *parts,
        steps,
        betas,
        decay,
        dt,
        decay if skip is None else skip,
        states,
        slots,
        out,
        k**-0.5,
        least_step,
        parts[0].stride(0),
        steps.stride(0),
        groups,
        R=shared,
        K=k,
        V=v,
        KIND=kind.value,
        K_PAD=k_pad,
        BLOCK=block,
    )
    return out
