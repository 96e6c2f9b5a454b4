"""Triton kernel of the convolution of recurrent layers, and the sequences of a step as read by kernels.

A decoding row is a sequence of one token, so rows and chunks of prompts share a launch. The state of a row is updated
in place. The states of chunks are written by a second launch, since other programs of the first still read the old
ones. The reference is `StepStates.convolve` (model/recurrent/states.py). Sums are float32.

All unused rows have slot 0, so several programs may write it; its content is never used.

Shapes: T tokens, B rows, n chunks, C channels, W kernel size of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.functional.triton_language import tl, triton
from hybrid_rlhf.generation.architecture.model_description import Activation
from hybrid_rlhf.generation.ops.rows import ACTIVATION_NUMBERS, activated
from hybrid_rlhf.generation.transfers import to_device

_CHANNELS = 256
"""Number of channels per program: eight for each thread of a warp."""


@dataclass(frozen=True)
class StepSequences:
    """Sequences of a step as read by kernels: B decoding rows of one token each, then n chunks."""

    slots: Tensor
    """[B + n] slots of the states; contiguous, as kernels read them."""
    rows: int
    of_token: Tensor
    """[T] int32, sequence of each token. Without chunks, this and what follows are not read."""
    firsts: Tensor
    """[B + n + 1] int32, index of the first token of each sequence, then T."""
    fresh: Tensor
    """[B + n] int32, 1 for a sequence that begins with its chunk, else 0."""

    @classmethod
    def of(cls, slots: Tensor, rows: int, starts: Sequence[int], lengths: Sequence[int]) -> StepSequences:
        """Args: slots of all sequences, number of decoding rows, first positions and lengths of the chunks."""
        assert slots.is_contiguous(), slots.stride()
        if not lengths:
            return cls(slots, rows, slots, slots, slots)
        tokens = torch.tensor([*[1] * rows, *lengths])
        firsts = torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])
        fresh = torch.tensor([*[False] * rows, *(start == 0 for start in starts)])
        of_token = torch.arange(len(tokens)).repeat_interleave(tokens)
        return cls(slots, rows, *(to_device(part.int(), slots.device) for part in (of_token, firsts, fresh)))


@triton.jit
def sequence(index, slots, firsts, fresh, CHUNKS: tl.constexpr):
    """Slot of a sequence, its first token, the token after its last, and true if it begins with this step."""
    slot = tl.load(slots + index).to(tl.int64)
    first = index
    end = index + 1
    begins = index < 0
    if CHUNKS:
        first = tl.load(firsts + index).to(tl.int64)
        end = tl.load(firsts + index + 1).to(tl.int64)
        begins = tl.load(fresh + index) != 0
    return slot, first, end, begins


@triton.jit
def _convolve_kernel(
    x,
    weight,
    bias,
    states,
    slots,
    of_token,
    firsts,
    fresh,
    out,
    rows,
    x_stride,
    channels,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one block of channels of one token. For a row, also shifts the state [W - 1, C]."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    index = token
    if CHUNKS:
        index = tl.load(of_token + token).to(tl.int64)
    slot, first, _, begins = sequence(index, slots, firsts, fresh, CHUNKS)
    before = token - first
    state = states + slot * (W - 1) * channels + channel
    mixed = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(W):
        back = W - 1 - place
        value = tl.load(x + (token - back) * x_stride + channel, mask=inside & (before >= back), other=0.0)
        if place < W - 1:
            from_state = inside & (before < back) & (begins == 0)
            value += tl.load(state + (place + before) * channels, mask=from_state, other=0.0)
        mixed += value.to(tl.float32) * tl.load(weight + channel * W + place, mask=inside, other=0.0).to(tl.float32)
        if place > 0:
            # written by the thread that has read the old value
            tl.store(state + (place - 1) * channels, value, mask=inside & (token < rows))
    if BIAS:
        mixed += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION >= 0:
        mixed = activated(mixed, ACTIVATION)
    tl.store(out + token * channels + channel, mixed, mask=inside)


@triton.jit
def _keep_inputs_kernel(
    x,
    states,
    slots,
    firsts,
    fresh,
    rows,
    x_stride,
    channels,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the last inputs of a chunk, for one block of channels, to its state."""
    index = rows + tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    slot, first, end, begins = sequence(index, slots, firsts, fresh, True)
    state = states + slot * (W - 1) * channels + channel
    for place in tl.static_range(W - 1):
        token = end - (W - 1) + place
        value = tl.load(x + token * x_stride + channel, mask=inside & (token >= first), other=0.0)
        from_state = inside & (token < first) & (begins == 0)
        value += tl.load(state + (place + end - first) * channels, mask=from_state, other=0.0)
        tl.store(state + place * channels, value, mask=inside)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    sequences: StepSequences,
    activation: Activation | None,
) -> Tensor:
    """Causal convolution of each channel, then an activation. The last inputs become the states.

    Args:
        x: [T, C], possibly a part of longer rows.
        weight: [C, 1, W].
        bias: [C].
        states: [slots, W - 1, C].
        sequences: sequences of the tokens.
        activation: activation of the outputs, or none.

    Returns:
        [T, C].
    """
    tokens, channels = x.shape
    out = x.new_empty(tokens, channels)
    chunks = len(sequences.slots) - sequences.rows
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    width = weight.shape[-1]
    blocks = triton.cdiv(channels, block)
    sizes = (sequences.rows, x.stride(0), channels)
    _convolve_kernel[tokens, blocks](
        x,
        weight.contiguous(),
        weight if bias is None else bias,
        states,
        sequences.slots,
        sequences.of_token,
        sequences.firsts,
        sequences.fresh,
        out,
        *sizes,
        W=width,
        CHUNKS=chunks > 0,
        BIAS=bias is not None,
        ACTIVATION=-1 if activation is None else ACTIVATION_NUMBERS[activation],
        BLOCK=block,
        num_warps=1,
    )
    if chunks:
        of_chunks = (sequences.slots, sequences.firsts, sequences.fresh)
        _keep_inputs_kernel[chunks, blocks](x, states, *of_chunks, *sizes, W=width, BLOCK=block, num_warps=1)
    return out
