"""Linear recurrences, one token or many at once.

DECAYING_SCAN has a matrix per head as its state, which decays by a scalar. The state S of a head maps keys to values:
S <- exp(g) S + k v^T, with output S^T q. With the delta rule, the value that S already stores for a key is first
subtracted from the new one: v <- beta (v - exp(g) S^T k). Within a block of tokens, all outputs are products of queries
and keys, weighted by the decay between two tokens; the delta rule adds a triangular system. Only the state passes
between blocks.

A selective scan has a vector per channel as its state, and each element has a separate decay rate. Blocks run twice:
once from zero, to compute what each block adds to the state, and then from the true state before the block.

Source: Mamba-2 (arXiv 2405.21060, section 6) and, for the delta rule, DeltaNet (arXiv 2406.06484, section 3) and its
gated form (arXiv 2412.06464, section 3.3); selective scan: Mamba (arXiv 2312.00752, section 3.2).

Shapes: B rows, N blocks of L tokens, G groups of r heads that share queries and keys [.., G, K]; values [.., G, r, V],
decays and betas [.., G, r], states [.., G, K, r, V].

On a GPU, a kernel computes a decoding step of a gated delta net or of Mamba-2, and reads and writes the states in place
through the slots of the rows. The kernel includes the preparation of inputs (normalised vectors, step sizes, decays).
All arithmetic is float32; the references round intermediate results to the dtype of the model. Chunks are computed by
matrix products in torch on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybrid_rlhf.functional.triton_language import tl, triton

_TILE_SIZE = 4096
"""Number of state elements per program of a decaying scan."""
_DELTA = tl.constexpr(0)
_MAMBA2 = tl.constexpr(1)


def _as_given(*tokens: Tensor) -> tuple[Tensor, ...]:
    return tokens


@dataclass(frozen=True)
class Rule:
    """A recurrence over float32 inputs."""

    step: Callable[..., Tensor]
    """Maps states [B, ...] and inputs [B, ...] of one token per row to outputs [B, ...]; updates the states."""
    blocks: Callable[..., Tensor]
    """Maps states [n, ...], rounds and inputs [N, L, ...] to outputs [N, L, ...]; updates the states.

    Round i is the slice with the i-th blocks of the first sequences. Inputs are zero after the end of a sequence, and
    zero inputs must not change the state."""
    inputs: Callable[..., tuple[Tensor, ...]] = _as_given
    """Computes the inputs of the recurrence from the tensors of a layer."""
    skip: Callable[..., Tensor] | None = None
    """Computes a term of the outputs from the tensors of a layer; none: there is no such term."""
    kernel: Callable[..., Tensor] | None = None
    """Maps the states of all slots, the slots [B], and the tensors of a layer for one token per row to outputs [B,
    ...]; updates the states. It includes `inputs` and `skip`. Used if the states of a step have kernels."""


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
    """Update the states by one token; returns outputs [B, G, r, V]."""
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
    """Update the states by blocks of tokens; returns outputs [N, L, G, r, V]."""
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
    decay = g.exp()[..., None]
    left = (g[..., -1:] - g).exp()[..., None]
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
"""Rule with inputs q, k, v, g, and beta for the delta rule."""


def selective_rule(rates: Tensor) -> Rule:
    """Return the rule S <- exp(dt rates) S + x dt B^T, with output S C and inputs x dt [.., C], dt [.., C], B, C [..,
    K].

    Rates and states are [C, K].
    """
    return Rule(partial(_selective_step, rates), partial(_selective_blocks, rates))


def _selective_step(rates: Tensor, state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Update the states by one token; returns outputs [B, C]."""
    state.mul_((dt[..., None] * rates).exp_()).baddbmm_(x[..., None], b[:, None])
    return torch.bmm(state, c[..., None]).squeeze(-1)


def _selective_blocks(
    rates: Tensor, state: Tensor, rounds: Sequence[slice], x: Tensor, dt: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    """Update the states by blocks of tokens; returns outputs [N, L, C]."""
    added = x.new_zeros(len(x), *rates.shape)
    for token in range(x.shape[1]):
        _selective_step(rates, added, x[:, token], dt[:, token], b[:, token], c[:, token])
    decay = (dt.sum(dim=1)[..., None] * rates).exp()
    before = torch.empty_like(added)
    for part in rounds:
        current = state[: part.stop - part.start]
        before[part] = current
        current.mul_(decay[part]).add_(added[part])
    tokens = zip(*(part.unbind(dim=1) for part in (x, dt, b, c)), strict=True)
    return torch.stack([_selective_step(rates, before, *token) for token in tokens], dim=1)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also accurate for small exp(x)."""
    e = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0))))


@triton.jit
def _unit(x):
    """Divide a vector by its length."""
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
    """Compute one token of one head of a row, for a block of values: S <- exp(g) S + k v^T, with output S^T q."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group = head // R
    key = tl.arange(0, K_PAD)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = key < K, value < V
    queries = tl.load(q + row * token_stride + group * K + key, mask=is_key, other=0.0).to(tl.float32)
    keys = tl.load(k + row * token_stride + group * K + key, mask=is_key, other=0.0).to(tl.float32)
    raw_values = tl.load(v + row * token_stride + head * V + value, mask=is_value, other=0.0).to(tl.float32)
    rate = tl.load(decay + head).to(tl.float32)
    step = _softplus(tl.load(steps + row * gate_stride + head).to(tl.float32) + tl.load(dt + head).to(tl.float32))
    step = tl.maximum(step, least_step)
    faded = tl.exp(-tl.exp(rate) * step)
    values = raw_values * step if KIND == _MAMBA2 else raw_values
    if KIND == _DELTA:
        queries = _unit(queries) * scale
        keys = _unit(keys)
    where = (group * K + key)[:, None] * (R * V) + (head % R * V + value)[None, :]
    state = states + tl.load(slots + row).to(tl.int64) * groups * (K * R * V) + where
    inside = is_key[:, None] & is_value[None, :]
    memory = tl.load(state, mask=inside, other=0.0) * faded
    if KIND == _DELTA:
        beta = tl.sigmoid(tl.load(betas + row * gate_stride + head).to(tl.float32))
        values = (values - tl.sum(memory * keys[:, None], 0)) * beta
    memory += keys[:, None] * values[None, :]
    tl.store(state, memory, mask=inside)
    read = tl.sum(memory * queries[:, None], 0)
    if KIND == _MAMBA2:
        read += raw_values * tl.load(skip + head).to(tl.float32)
    tl.store(out + (row * groups * R + head) * V + value, read, mask=is_value)


def values_at_once(k_pad: int, v: int) -> int:
    """Number of values per tile of a head's state [K, V], where `k_pad` is K rounded up to a power of two."""
    return min(triton.next_power_of_2(v), max(8, _TILE_SIZE // k_pad))


def delta_step(decay: Tensor, dt: Tensor, states: Tensor, slots: Tensor, mixed: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Compute one token of each row of a gated delta net.

    Args:
        decay: [G r] logarithms of rates.
        dt: [G r] biases of step sizes.
        states: [slots, G, K, r, V]; updated.
        slots: [B] slots of the rows.
        mixed: queries, keys and values [B, 2 G K + G r V].
        b: [B, G r] betas before the sigmoid; rows may be parts of longer ones.
        a: [B, G r] step sizes before bias and softplus; rows may be parts of longer ones.

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
    """Compute one token of each row of a Mamba-2 mixer.

    Args:
        decay: [G r] logarithms of rates.
        dt_bias: [G r] biases of step sizes.
        skip: [G r] factors of the inputs in the outputs.
        states: [slots, G, K, r, V]; updated.
        slots: [B] slots of the rows.
        mixed: inputs, B and C [B, G r V + 2 G K].
        dt: [B, G r] step sizes before bias and softplus; rows may be parts of longer ones.
        least_step: lower bound of the step sizes.

    Returns:
        [B, G, r, V] float32.
    """
    _, groups, k, shared, v = states.shape
    inner = groups * shared * v
    gates = (dt, dt)
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
    """Launch the kernel. `parts`: queries, keys and values; `gates`: step sizes and betas."""
    _, groups, k, shared, v = states.shape
    rows = len(slots)
    k_pad = triton.next_power_of_2(k)
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
