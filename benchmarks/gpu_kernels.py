"""The part of `benchmarks.gpu_hour` on kernels of a decoding step, against float64.

On a CPU (`--small`) the Triton kernels run under the interpreter, which shows that the part works and no speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_record import DEVICE, ON_GPU, Record, limits, seconds
from hybrid_rlhf.generation import ops

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
