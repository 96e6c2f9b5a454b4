"""Parts of `benchmarks.gpu_hour` on kernels: those of a decoding step against float64, and torch's attention.

On a CPU (`--small`) the Triton kernels run under the interpreter, which shows that the part works and no speed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_record import DEVICE, ON_GPU, Record, limits, seconds, synchronize
from hybrid_rlhf.generation import ops
from hybrid_rlhf.models.packing.attention import varlen_attention
from hybrid_rlhf.models.packing.rows import boundaries

SHAPES = [(7, 128), (7, 64), (4, 80), (1, 96), (2, 256)]
"""Queries of a KV head, and head size."""
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def kernels(record: Record, *, small: bool) -> None:
    """Error against float64, microseconds, and bytes a second beside a copy's."""
    from hybrid_rlhf.generation.ops import gpu as triton_kernels

    record.measure("limits", lambda: limits(small=small))
    copy = record.figures["limits"]["copy_gb_per_second"]
    rows, kv_heads, capacity = (2, 1, 96) if small else (64, 4, 4096)
    for group, d in SHAPES[:1] if small else SHAPES:
        for splits in (1, 2) if small else (1, 8, 32):
            record.measure(
                f"attention G={group} D={d} splits={splits}",
                lambda g=group, d=d, s=splits: _attention(triton_kernels, g, d, s, rows, kv_heads, capacity, copy),
            )
    width, mlp, tokens = (64, 96, 3) if small else (3584, 18944, 256)
    x, delta, weight = torch.randn(tokens, width), torch.randn(tokens, width), torch.randn(width)
    x, delta, weight = (t.to(DEVICE, DTYPE) for t in (x, delta, weight))
    both = torch.randn(tokens, 2 * mlp).to(DEVICE, DTYPE)

    def norm() -> tuple[Tensor, Tensor]:
        return triton_kernels.add_norm(x, delta, weight, 1e-6, in_float32=False)

    def gate() -> Tensor:
        return triton_kernels.gated(both, "silu")

    exact = functional.rms_norm((x + delta).double(), (width,), weight.double(), 1e-6)
    moved = 4 * x.numel() * x.element_size()
    record.measure(f"residual and norm [{tokens}, {width}]", lambda: _figures(norm, norm()[1], exact, moved, copy))
    left, right = both.double().chunk(2, dim=-1)
    moved = 3 * tokens * mlp * both.element_size()
    exact = functional.silu(left) * right
    record.measure(f"gate and product [{tokens}, {mlp}]", lambda: _figures(gate, gate(), exact, moved, copy))


def _attention(
    module: Any, group: int, d: int, splits: int, rows: int, kv_heads: int, capacity: int, copy: float
) -> dict[str, float]:
    torch.manual_seed(0)
    keys, values = (torch.randn(rows * capacity // 16, 16, kv_heads, d).to(DEVICE, DTYPE) for _ in "kv")
    pages = torch.randperm(len(keys)).int().view(rows, -1).to(DEVICE)
    queries = torch.randn(rows, group * kv_heads, d).to(DEVICE, DTYPE)
    positions = torch.full((rows,), capacity - 1, device=DEVICE)
    with mock.patch.object(ops.attention, "splits_of", lambda programs, capacity: (splits, 16)):

        def run() -> Tensor:
            return module.paged_attention(queries, keys, values, pages, positions, scale=d**-0.5)  # type: ignore[no-any-return]

        first = pages[0].long()
        k, v = (
            x[first].flatten(0, 1).double().repeat_interleave(group, dim=1).transpose(0, 1)[None]
            for x in (keys, values)
        )
        exact = functional.scaled_dot_product_attention(queries[:1, :, None].double(), k, v)[:, :, 0]
        return _figures(run, run()[:1], exact, 2 * keys.numel() * keys.element_size(), copy)


def _figures(run: Callable[[], Any], found: Tensor, exact: Tensor, moved: int, copy: float) -> dict[str, float]:
    took = seconds(run, runs=20 if ON_GPU else 1, calls=10 if ON_GPU else 1)
    speed = moved / took / 1e9
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    return {
        "relative_error": error,
        "microseconds": took * 1e6,
        "gb_per_second": speed,
        "share_of_copy": speed / copy,
    }


def attention(record: Record, *, small: bool) -> None:
    """Rows of 20 shapes that were never seen: SDPA with cuDNN on and off, and one varlen call; forward and backward."""
    heads, kv_heads, d = (4, 2, 16) if small else (28, 4, 128)
    generator = torch.Generator().manual_seed(0)
    longest = 64 if small else 2048
    shapes = [
        (int(n), int(length))
        for n, length in zip(
            torch.randint(2, 9, (20,), generator=generator),
            torch.randint(longest // 4, longest, (20,), generator=generator),
            strict=True,
        )
    ]
    for name, cudnn in (("SDPA, cuDNN off", False), ("SDPA, cuDNN on", True)):
        record.measure(name, lambda c=cudnn: _fresh(shapes, lambda n, t: _sdpa(n, t, heads, kv_heads, d), cudnn=c))
    if varlen_attention(DEVICE, DTYPE, d) is not None:
        record.measure("varlen", lambda: _fresh(shapes, lambda n, t: _varlen(n, t, heads, kv_heads, d), cudnn=False))


def _fresh(
    shapes: list[tuple[int, int]], make: Callable[[int, int], Callable[[], None]], *, cudnn: bool
) -> dict[str, float]:
    """Milliseconds of the first and the second call at each shape, as sums."""
    first, second = 0.0, 0.0
    with _cudnn(cudnn):
        make(1, 16)()
        for rows, length in shapes:
            run = make(rows, length)
            took = []
            for _ in range(2):
                synchronize()
                start = time.perf_counter()
                run()
                synchronize()
                took.append(1e3 * (time.perf_counter() - start))
            first, second = first + took[0], second + took[1]
    return {"first_calls_ms": first, "second_calls_ms": second, "a_new_shape_costs_ms": (first - second) / len(shapes)}


@contextlib.contextmanager
def _cudnn(enabled: bool) -> Any:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).to(DEVICE, DTYPE).requires_grad_() for shape in shapes]


def _sdpa(rows: int, length: int, heads: int, kv_heads: int, d: int) -> Callable[[], None]:
    q, k, v = _leaves((rows, heads, length, d), (rows, kv_heads, length, d), (rows, kv_heads, length, d))

    def run() -> None:
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(mixed.sum(), (q, k, v))

    return run


def _varlen(rows: int, length: int, heads: int, kv_heads: int, d: int) -> Callable[[], None]:
    attend = varlen_attention(DEVICE, DTYPE, d)
    assert attend is not None
    q, k, v = _leaves((rows * length, heads, d), (rows * length, kv_heads, d), (rows * length, kv_heads, d))
    ends = boundaries(torch.full((rows,), length, device=DEVICE))

    def run() -> None:
        mixed = attend(q, k, v, (ends, ends), (length, length), scale=None, window=None)
        torch.autograd.grad(mixed.sum(), (q, k, v))

    return run
