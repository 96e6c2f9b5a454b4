"""Triton kernels of single tokens: rotary positions with the write to the KV cache, and gates.

Activation and product of a gated MLP are one kernel. All arithmetic is float32; the references round intermediate
results to the dtype of the model.

Shapes: T tokens, A heads and K KV heads of this rank, D head size, P pages of N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.functional.triton_language import tl, triton
from hybrid_rlhf.generation.architecture.model_description import Activation

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
ACTIVATION_NUMBERS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


def concatenated(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors, without a copy if there is only one."""
    return torch.cat(list(parts), dim=dim) if len(parts) > 1 else parts[0]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to heads [T, heads, D]; cos and sin [T, 1, R] are for the first R dimensions.

    sin includes the sign of the rotated halves: [-sin, sin].
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotated(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    half = width // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


@triton.jit
def rotated_head(x, source, cos, sin, place, WIDTH: tl.constexpr):
    """Rotate the first WIDTH dimensions of head x, which was loaded from source."""
    turned = place < WIDTH
    partner = tl.load(source + (place + WIDTH // 2) % WIDTH, mask=turned, other=0.0).to(tl.float32)
    c = tl.load(cos + place, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + place, mask=turned, other=0.0).to(tl.float32)
    return x * c + partner * s


@triton.jit
def _rotate_and_write_kernel(
    qkv,
    cos,
    sin,
    places,
    queries,
    keys,
    values,
    kv_heads,
    row_stride,
    stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Process one head of one token: write queries to [T, A, D], keys and values to the cache [P, N, K, D] of a
    layer."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.arange(0, D_PAD)
    inside = place < D
    source = qkv + row * row_stride + head * D
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    if WIDTH > 0:
        if head < HEADS + kv_heads:
            x = rotated_head(x, source, cos + row * WIDTH, sin + row * WIDTH, place, WIDTH)
    if head < HEADS:
        tl.store(queries + (row * HEADS + head) * D + place, x, mask=inside)
    else:
        kv_head = (head - HEADS) % kv_heads
        target = tl.load(places + row) * stride + kv_head * D
        if head < HEADS + kv_heads:
            tl.store(keys + target + place, x, mask=inside)
        else:
            tl.store(values + target + place, x, mask=inside)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply the activation with this number (ACTIVATION_NUMBERS)."""
    if ACTIVATION == 0:
        x = x * tl.sigmoid(x)
    elif ACTIVATION == 1:
        x = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x = tl.maximum(x, 0.0)
        if ACTIVATION == 4:
            x = x * x
    return x


@triton.jit
def _gated_kernel(gate_up, out, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one block of a row of activation(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    source = gate_up + row * 2 * width
    x = activated(tl.load(source + place, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    x *= tl.load(source + width + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + place, x, mask=inside)


def rotate_and_write(
    qkv: Tensor, table: tuple[Tensor, Tensor] | None, places: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache.

    Args:
        qkv: [T, A + 2 K, D]; the heads of a token are contiguous.
        table: cosines and signed sines [T, 1, R] of the first R dimensions; none: no rotation.
        places: [T] int64, index of each token in P * N.
        keys: [P, N, K, D] of a layer; those of a token are contiguous.
        values: as keys.

    Returns:
        queries [T, A, D].
    """
    tokens, all_heads, d = qkv.shape
    kv_heads = keys.shape[2]
    heads = all_heads - 2 * kv_heads
    queries = qkv.new_empty(tokens, heads, d)
    cos, sin = (qkv, qkv) if table is None else table
    _rotate_and_write_kernel[tokens, all_heads](
        qkv,
        cos,
        sin,
        places,
        queries,
        keys,
        values,
        kv_heads,
        qkv.stride(0),
        keys.stride(1),
        HEADS=heads,
        D=d,
        D_PAD=triton.next_power_of_2(d),
        WIDTH=0 if table is None else cos.shape[-1],
        num_warps=1,
    )
    return queries


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up [T, M] for gate and up [T, 2 M]."""
    tokens = len(gate_up)
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    number = ACTIVATION_NUMBERS[activation]
    _gated_kernel[tokens, triton.cdiv(width, block)](gate_up, out, width, ACTIVATION=number, BLOCK=block)
    return out
