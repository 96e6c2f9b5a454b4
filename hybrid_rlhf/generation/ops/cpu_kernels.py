"""Compiled kernels of a decoding step on a CPU, for operations that need several passes or padding in torch.

They are the CPU counterpart of the Triton kernels (gpu.py). Attention reads the blocks of a row in place in the cache,
and its work is proportional to the length of each row. Long rows are split into spans over threads (flash decoding: the
parts are combined by their maxima and sums, arXiv 2205.14135, section 3.1). All arithmetic is float32. The results of a
row depend neither on the number of threads nor on the other rows.

The kernels are in cpu_kernels.cpp, compiled on first use (compiled.py); `available` tells if they can be used. Tensors
are float32 or bfloat16. An index out of range raises IndexError: nothing is read or written outside a tensor.

Shapes: B rows, T tokens, A heads and K KV heads of this rank, D head size, H hidden; N blocks of the cache of BS tokens
each, M blocks of a row.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation.ops.compiled import CannotCompile, load, openmp_parallel
from hybrid_rlhf.generation.ops.sampling import SamplingMode, SamplingRows
from hybrid_rlhf.runtime.observability.logs import logger

DTYPES = (torch.float32, torch.bfloat16)
"""Supported dtypes of weights, KV cache and activations."""
_SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
_TILE_OUTPUTS = 48
"""Number of outputs of a float32 product that are computed together."""
_INT8_OUTPUTS = 32
"""Number of outputs of an int8 product that are computed together."""
_MOST_TOKENS = 1 << 21
"""Largest vocabulary whose weights sampling can sum as integers."""
# Error codes of the library; 0: no error.
_NO_MEMORY = 1
_OUTSIDE = 2
_STRUCTS = {
    name: struct.Struct(f"@{fields}")
    for name, fields in (
        ("hybrid_paged_attention", "3q8q11q2d"),
        ("hybrid_norm", "3q5q7qd"),
        ("hybrid_pack", "3q2q2q"),
        ("hybrid_linear", "3q4q3q"),
        ("hybrid_dequantise", "3q6q4qd"),
        ("hybrid_int8_linear", "3q6q3q"),
        ("hybrid_sample", "3q9q4q"),
    )
}
"""Argument structs of the library: address of GOMP_parallel, threads, dtype, then addresses and numbers."""


class _Library:
    """The loaded library, and the OpenMP function that starts threads."""

    def __init__(self) -> None:
        """Compile or load the library; raises CannotCompile."""
        self._parallel = openmp_parallel()
        library = load(_SOURCE)
        self._kernels = {name: (library[name], fields.pack) for name, fields in _STRUCTS.items()}
        for function, _ in self._kernels.values():
            function.argtypes = [ctypes.c_char_p]
            function.restype = ctypes.c_int

    def call(self, name: str, dtype: torch.dtype, *arguments: Tensor | float | None) -> None:
        """Run a kernel for a dtype, with torch's number of threads. Tensors are passed as addresses, none as 0."""
        if dtype not in DTYPES:
            raise TypeError(f"the dtype must be float32 or bfloat16, got {dtype}")
        function, pack = self._kernels[name]
        values = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in arguments]
        error = function(pack(self._parallel, torch.get_num_threads(), dtype == torch.bfloat16, *values))
        if error == _OUTSIDE:
            raise IndexError(
                f"{name}: a position, place or block is outside the KV cache, or a token of the vocabulary"
            )
        if error == _NO_MEMORY:
            raise MemoryError(f"{name}: no memory for intermediate results")


def available() -> bool:
    """True if the kernels can be used. The first call compiles them, and logs the reason if that fails."""
    return _library_or_none() is not None


@functools.cache
def _library_or_none() -> _Library | None:
    try:
        return _Library()
    except CannotCompile as error:
        logger.info("generation uses torch's operations instead of compiled CPU kernels: %s", error)
        return None


def _library() -> _Library:
    library = _library_or_none()
    if library is None:
        raise RuntimeError("the compiled CPU kernels are not available: ask available() before")
    return library


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention outputs [B, A, D] of one token per row over its blocks.

    Args:
        queries: [B, A, D].
        keys: [N, BS, K, D] of a layer, including the new ones; those of a token are contiguous.
        values: as keys.
        blocks: [B, M] int32, the blocks of each row in order; those after its position or before its window are
            ignored.
        positions: [B] int64 positions of the new tokens, which attend to keys up to and including their own.
        scale: factor of the scores.
        window: number of tokens that a query attends to, including itself; none: all.
        chunked: the window begins at the last multiple of its size, instead of sliding.
        softcap: scores s become cap tanh(s / cap); none: no cap.
        bias: [A, S] float32, added to the scores of each head, by the position of the key; none: no bias.
        sinks: [A], score of a key without a value for each head; none: no sinks.
    """
    batch, heads, d = queries.shape
    cache_blocks, block_tokens, kv_heads, _ = keys.shape
    queries = queries.contiguous()
    mixed = torch.empty_like(queries)
    sizes = (batch, heads, kv_heads, d, keys.stride(1), blocks.shape[1], block_tokens, cache_blocks)
    _library().call(
        "hybrid_paged_attention",
        queries.dtype,
        queries,
        keys,
        values,
        blocks,
        positions,
        bias,
        None if sinks is None else sinks.float(),
        mixed,
        *sizes,
        0 if bias is None else bias.shape[1],
        window,
        chunked,
        scale,
        softcap,
    )
    return mixed


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> tuple[Tensor, Tensor]:
    """Return x + delta and its RMS norm, each [T, H].

    Args:
        x: [T, H].
        delta: as x.
        weight: [H], of x's dtype or float32.
        eps: added to the mean square.
        in_float32: apply the weight before rounding.
    """
    x = x.contiguous()
    added = torch.empty_like(x)
    normed = torch.empty_like(x)
    _norm(x, delta.contiguous(), weight, eps, in_float32, added, normed)
    return added, normed


def norm(x: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> Tensor:
    """Return the RMS norm of x [T, H] or of heads [T, heads, H], which may be a part of the heads of a tensor."""
    normed = x.new_empty(x.shape)
    _norm(x if x.stride(-1) == 1 else x.contiguous(), None, weight, eps, in_float32, None, normed)
    return normed


def _norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    in_float32: bool,
    added: Tensor | None,
    normed: Tensor,
) -> None:
    inner = 1 if x.dim() == 2 else x.shape[1]
    outer_stride, inner_stride = x.stride()[:2]
    sizes = (x.shape[0] * inner, inner, outer_stride, inner_stride, x.shape[-1])
    narrow = weight.dtype != torch.float32
    _library().call("hybrid_norm", x.dtype, x, delta, weight, added, normed, narrow, *sizes, in_float32, eps)


def multiplies_float32() -> bool:
    """True if `linear` is faster than oneDNN for few rows on this machine, which holds with AVX-512 and not with
    AVX2."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and available()


def pack(weight: Tensor) -> Tensor:
    """Pack weights [N, K] float32 in the order in which `linear` reads them."""
    outputs, inputs = weight.shape
    packed = weight.new_empty(-(-outputs // _TILE_OUTPUTS), inputs, _TILE_OUTPUTS)
    _library().call("hybrid_pack", weight.dtype, weight.contiguous(), packed, inputs, outputs)
    return packed


def linear(x: Tensor, weight: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """Return x W^T + b [T, N] for x [T, K] float32, a weight from `pack` with N outputs, and a bias [N] float32 or
    none."""
    rows, inputs = x.shape
    out = x.new_empty(rows, outputs)
    _library().call("hybrid_linear", x.dtype, x.contiguous(), weight, bias, out, rows, inputs, outputs)
    return out


def dequantise(codes: Tensor, state: Any, weight: Tensor) -> None:
    """Write the values of 4-bit codes, in the dtype from which they were quantised, to a contiguous weight [N, K].

    Args:
        codes: [N K / 2, 1] uint8, two codes per byte.
        state: bitsandbytes' QuantState, with double quantisation.
        weight: the result, of that dtype or float32.
    """
    scales = state.state2
    narrow = state.dtype == torch.bfloat16
    tensors = (codes, state.absmax, state.code, scales.code, scales.absmax, weight)
    sizes = (weight.numel(), state.blocksize, scales.blocksize, narrow)
    _library().call("hybrid_dequantise", weight.dtype, *tensors, *sizes, float(state.offset))


def pack_int8(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Pack weights [N, K] int8 in the order in which `int8_linear` reads them; also returns 128 times the sum of each
    row."""
    outputs, inputs = codes.shape
    whole = functional.pad(codes, (0, -inputs % 4, 0, -outputs % _INT8_OUTPUTS))
    packed = whole.view(-1, _INT8_OUTPUTS, whole.shape[1] // 4, 4).transpose(1, 2).contiguous()
    return packed, 128 * codes.sum(dim=1, dtype=torch.int32)


def int8_linear(x: Tensor, weight: Tensor, offset: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b [T, N], where each row of x is quantised to int8 (layers.py) and sums are int32.

    Args:
        x: [T, K].
        weight: packed codes from `pack_int8`.
        offset: [N] int32, from `pack_int8`.
        scale: [N] float32, value of code 1 of each row of the weights.
        bias: [N] float32, or none.
    """
    outputs = len(scale)
    rows, inputs = x.shape
    out = x.new_empty(rows, outputs)
    tensors = (x.contiguous(), weight, offset, scale, bias, out)
    _library().call("hybrid_int8_linear", x.dtype, *tensors, rows, inputs, outputs)
    return out


def sample(logits: Tensor, rows: SamplingRows, mode: SamplingMode) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the next token of each row and append it to the row. The reference is sampler.py in torch.

    Bounds of top_k and top_p are found by bisection over the bits of scores. The time of a row depends on its own
    parameters.

    Args:
        logits: [B, V] float32.
        rows: tables of B rows, which are read and written.
        mode: sampling features of the rows; unused, since the tables contain them.

    Returns:
        tokens [B] int64, and their log-probs [B] float32 under the full distribution and the sampled one.
    """
    count, vocabulary = logits.shape
    if vocabulary > _MOST_TOKENS:
        raise ValueError(f"a vocabulary may have {_MOST_TOKENS} tokens at most, got {vocabulary}")
    tokens = rows.integers.new_empty(count)
    logprobs = logits.new_empty(2, count)
    tables = (rows.integers, rows.floats, rows.seen, rows.bias, rows.allowed)
    tensors = (logits.contiguous(), *tables, tokens, *logprobs)
    sizes = (count, vocabulary, rows.integers.shape[1], rows.floats.shape[1])
    _library().call("hybrid_sample", logits.dtype, *tensors, *sizes)
    return tokens, logprobs[0], logprobs[1]
