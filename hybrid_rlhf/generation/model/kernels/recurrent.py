"""Triton kernels of recurrences: a step of a decaying scan, and a selective scan.

States are read and written where they lie, through the slots of the sequences. The selective scan walks the tokens of
rows and chunks in one launch. The chunks of a decaying scan are products (model/recurrent/scan.py). What a recurrence
makes of its inputs first (activations, vectors of unit length, step sizes, decays) is part of its kernel. The
references in torch are in model/recurrent/. All arithmetic is float32; the references round intermediate results to the
dtype of the model.

Shapes: T tokens, B rows, C channels, G groups of r heads, K and V sizes of keys and values, N size of a channel's
state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rlhf.generation.model.kernels.convolution import places, sequence
from hybrid_rlhf.generation.model.kernels.rows import ACTIVATION_NUMBERS, activated
from hybrid_rlhf.generation.model.recurrent.states import StepSequences
from hybrid_rlhf.generation.weights.description import Activation

_TILE_SIZE = 4096
"""Elements of a state that a program of a decaying scan holds."""
_SELECTIVE_TILE_SIZE = 1024
"""The same for a selective scan: smaller, as a chunk has no more programs than tiles."""
_DELTA, _MAMBA2, _LIGHTNING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
    ACTIVATION: tl.constexpr,
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
    values = given
    if KIND == _LIGHTNING:
        queries, keys, values = (
            activated(queries, ACTIVATION),
            activated(keys, ACTIVATION),
            activated(given, ACTIVATION),
        )
        faded = tl.exp(-rate)
    else:
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


@triton.jit
def _normed_part(part, weight, place, inside, eps, N: tl.constexpr):
    """RMS norm of B or C, rounded as the model does it."""
    x = tl.load(part + place, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    return (x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * w).to(part.dtype.element_ty).to(tl.float32)


@triton.jit
def _selective_scan_kernel(
    x,
    dt,
    b,
    c,
    gate,
    dt_bias,
    decay,
    skip,
    b_norm,
    c_norm,
    states,
    slots,
    firsts,
    fresh,
    out,
    eps,
    channels,
    part_stride,
    gate_stride,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of channels of a sequence, token by token: S <- exp(dt rates) S + x dt B^T, with output S C."""
    index, place = tl.program_id(0).to(tl.int64), tl.arange(0, N_PAD)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_place, inside = place < N, channel < channels
    both = inside[:, None] & is_place[None, :]
    slot, first, end, begins = sequence(index, slots, firsts, fresh, CHUNKS)
    where = channel[:, None] * N + place[None, :]
    rates = -tl.exp(tl.load(decay + where, mask=both, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + channel, mask=inside, other=0.0).to(tl.float32)
    skipped = tl.load(skip + channel, mask=inside, other=0.0).to(tl.float32)
    state = states + slot * channels * N + where
    memory = tl.load(state, mask=both & (begins == 0), other=0.0)
    for token in range(first, end):
        given = tl.load(x + token * channels + channel, mask=inside, other=0.0).to(tl.float32)
        step = _softplus(tl.load(dt + token * channels + channel, mask=inside, other=0.0).to(tl.float32) + bias)
        written = _normed_part(b + token * part_stride, b_norm, place, is_place, eps, N)
        read = _normed_part(c + token * part_stride, c_norm, place, is_place, eps, N)
        memory = memory * tl.exp(step[:, None] * rates) + (given * step)[:, None] * written[None, :]
        mixed = tl.sum(memory * read[None, :], 1) + given * skipped
        z = tl.load(gate + token * gate_stride + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * channels + channel, mixed * z * tl.sigmoid(z), mask=inside)
    tl.store(state, memory, mask=both)


def values_at_once(k_pad: int, v: int) -> int:
    """Values of a tile of a head's state [K, V], of which K is padded."""
    return min(triton.next_power_of_2(v), max(8, _TILE_SIZE // k_pad))


def channels_at_once(n_pad: int, channels: int) -> int:
    """Channels of a tile of a state [C, N], of which N is padded."""
    return min(triton.next_power_of_2(channels), max(1, _SELECTIVE_TILE_SIZE // n_pad))


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


def lightning_step(rates: Tensor, activation: Activation, states: Tensor, slots: Tensor, qkv: Tensor) -> Tensor:
    """A token of each row in lightning attention.

    Args:
        rates: [G].
        activation: of queries, keys and values.
        states: [slots, G, K, 1, K]; updated.
        slots: [B].
        qkv: [B, 3 G K] before the activation, whose rows may be parts of longer ones.

    Returns:
        [B, G, 1, K] float32.
    """
    width = states.shape[1] * states.shape[2]
    parts = qkv, qkv[:, width:], qkv[:, 2 * width :]
    return _decaying_step(_LIGHTNING, parts, rates, states, slots, activation=activation)


def _decaying_step(
    kind: tl.constexpr,
    parts: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    states: Tensor,
    slots: Tensor,
    *,
    gates: tuple[Tensor, Tensor] | None = None,
    dt: Tensor | None = None,
    skip: Tensor | None = None,
    least_step: float = 0.0,
    activation: Activation = "silu",
) -> Tensor:
    """`parts`: queries, keys and values; `gates`: step sizes and betas."""
    _, groups, k, shared, v = states.shape
    rows, k_pad = len(slots), triton.next_power_of_2(k)
    block = values_at_once(k_pad, v)
    out = torch.empty(rows, groups, shared, v, dtype=torch.float32, device=states.device)
    steps, betas = gates or (decay, decay)
    _decaying_step_kernel[rows, groups * shared, triton.cdiv(v, block)](
        *parts,
        steps,
        betas,
        decay,
        decay if dt is None else dt,
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
        ACTIVATION=ACTIVATION_NUMBERS[activation],
        K_PAD=k_pad,
        BLOCK=block,
    )
    return out


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b_and_c: Tensor,
    gate: Tensor,
    weights: Mapping[str, Tensor],
    states: Tensor,
    sequences: StepSequences,
    eps: float,
) -> Tensor:
    """All tokens in a Mamba mixer, multiplied by the activated gate.

    Args:
        x: [T, C].
        dt: step sizes [T, C] before bias and softplus.
        b_and_c: [T, 2 N] before their norms, whose rows may be parts of longer ones.
        gate: [T, C], alike.
        weights: `dt.bias` [C], `decay` [C, N] logarithms of rates, `skip` [C], `b_norm` and `c_norm` [N].
        states: [slots, C, N]; updated.
        sequences: of the tokens.
        eps: of the norms.

    Returns:
        [T, C].
    """
    _, channels, n = states.shape
    n_pad, out = triton.next_power_of_2(n), torch.empty_like(x)
    block = channels_at_once(n_pad, channels)
    slots, _, firsts, fresh = places(sequences)
    _selective_scan_kernel[len(slots), triton.cdiv(channels, block)](
        x,
        dt,
        b_and_c,
        b_and_c[:, n:],
        gate,
        *(weights[name].contiguous() for name in ("dt.bias", "decay", "skip", "b_norm", "c_norm")),
        states,
        slots,
        firsts,
        fresh,
        out,
        eps,
        channels,
        b_and_c.stride(0),
        gate.stride(0),
        N=n,
        CHUNKS=sequences.chunks is not None,
        N_PAD=n_pad,
        BLOCK=block,
        num_warps=2,
    )
    return out
