"""The Triton kernels of latent attention, against torch, and models on them against themselves without.

They run as those in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.generation import ops
from hybrid_rlhf.generation.ops import gpu as kernels
from hybrid_rlhf.generation.ops.norms import rms_norm
from hybrid_rlhf.generation.ops.rows import rotated
from tests.generation.references import assert_fits, exact_attention
from tests.support.marks import faults
from tests.support.triton_kernels import HALF

pytest.importorskip("triton")


CLOSE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    HALF: {"atol": 2e-2, "rtol": 2e-2},
}


def table_of(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Random cosines and signed sines; none for width 0."""
    if not width:
        return None
    angles = torch.randn(tokens, 1, width // 2)
    cos, sin = torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return cos.to(dtype), sin.to(dtype)


def turned(x: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
    return x if table is None else rotated(x, *table)


SIZES = [(3, 5, 6, 4, 12, 7), (16, 8, 8, 0, 32, 16), (40, 10, 64, 64, 128, 20)]
"""Heads; plain and rotated dimensions; how many of them are rotated; dimensions of latents and of values."""


@pytest.mark.parametrize(
    ("sizes", "splits", "rows", "chunks"),
    [
        *((sizes, splits, 2, True) for sizes in SIZES for splits in (1, 4)),
        (SIZES[0], 4, 2, False),
        (SIZES[0], 4, 0, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_rows_and_chunks_attend_to_latents(
    sizes: tuple[int, ...],
    splits: int,
    rows: int,
    chunks: bool,
    dtype: torch.dtype,
    on_the_device: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one launch: a long and a short row, a chunk and the first tokens of a sequence; and rows or chunks alone."""
    monkeypatch.setattr(ops.latent, "splits_of", lambda programs, capacity: (splits, 16))
    torch.manual_seed(0)
    heads, plain, rotated, width, latent, values = sizes
    keys = torch.randn(40, 16, 1, rotated + latent).to(dtype)
    pages, positions = torch.randperm(40).int().view(4, 10), torch.tensor([150, 3])[:rows]
    starts, lengths = ([20, 0], [7, 3]) if chunks else ([], [])
    tokens = [*enumerate(positions.tolist())]
    for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True), start=rows):
        tokens += [(sequence, start + place) for place in range(length)]
    count, scale = len(tokens), (rotated + latent) ** -0.5
    queries, absorbed = (
        torch.randn(count, heads, plain + rotated).to(dtype),
        torch.randn(count, heads, latent).to(dtype),
    )
    up, table = torch.randn(heads, plain + values, latent).to(dtype)[:, plain:], table_of(count, width, dtype)
    tiles = kernels.chunk_tiles(rows, starts, lengths, tokens=kernels.latent_tokens_at_once(dtype))
    given = torch.tensor(tiles, dtype=torch.int32) if chunks else None
    found = kernels.latent_attention(queries, absorbed, up, table, keys, pages, positions, given, scale=scale)
    assert found.shape == (count, heads, values)
    whole = torch.cat([turned(queries[..., plain:], table), absorbed], dim=-1)
    mixed = exact_attention(whole, keys, keys, pages, tokens, scale=scale)[..., rotated:]
    expected = torch.einsum("tal,avl->tav", mixed, up.double())
    errors = (found.double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    assert errors.max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("hidden", [0, 20])
@pytest.mark.parametrize(("rotated", "width"), [(6, 6), (6, 4), (8, 0)])
@pytest.mark.parametrize("in_float32", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_latents_are_normed_and_written(
    hidden: int, rotated: int, width: int, in_float32: bool, dtype: torch.dtype, on_the_device: None
) -> None:
    """To a part of the cache, which other layers share; hidden: the latent of queries."""
    torch.manual_seed(0)
    down, table = torch.randn(5, hidden + 12 + rotated).to(dtype), table_of(5, width, dtype)
    weights = torch.randn(hidden).to(dtype), torch.randn(12).to(dtype)
    places, cache = torch.tensor([3, 40, 17, 0, 21]), torch.zeros(3, 16, 1, 3 + 12 + rotated).to(dtype)
    found = kernels.write_latents(
        down, weights[0] if hidden else None, weights[1], table, places, cache[..., 3:], eps=1e-5, in_float32=in_float32
    )
    given, latent, key = down.split([hidden, 12, rotated], dim=1)

    assert found.shape == given.shape
    if hidden:
        torch.testing.assert_close(found, rms_norm(given, weights[0], 1e-5, in_float32=in_float32), **CLOSE[dtype])
    expected = torch.zeros_like(cache).flatten(0, 1)[:, 0]
    normed = rms_norm(latent, weights[1], 1e-5, in_float32=in_float32)
    expected[places, 3:] = torch.cat([turned(key[:, None], table)[:, 0], normed], dim=1)
    torch.testing.assert_close(cache.flatten(0, 1)[:, 0], expected, **CLOSE[dtype])


_TILE = """
from hybrid_rlhf.generation.ops import latent
MULTIPLES.add("stride")
def attention(rotated, size, model, target, splits, tiles):
    constants = dict(N=16, U=2 * rotated, R=rotated, WIDTH=rotated, L=size, SPLITS=splits, SPAN=128, TILES=tiles)
    constants |= latent.latent_tile(rotated, size, TYPES[model], tiles=tiles)
    warps = constants.pop("num_warps")
    return shared_bytes(latent._latent_kernel, constants, model, target, {"num_warps": warps})
def written(rotated, size, model, target, hidden):
    sizes = dict(Q=hidden, Q_PAD=latent.padded(hidden), R=rotated, R_PAD=rotated, L=size, L_PAD=size)
    shared_bytes(latent._write_latents_kernel, dict(sizes, WIDTH=rotated, IN_FLOAT32=False), model, target)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", [90, *(faults(target) for target in (80, 100))])
def test_latents_of_published_models_fit_into_shared_memory(target: int) -> None:
    """DeepSeek V2, V3 and their relatives have 64 + 512 dimensions, MiniCPM3 has 32 + 256; the latent of queries has 0
    or 1536 in DeepSeek, 768 in MiniCPM3."""
    hidden = ((64, 512, 0), (64, 512, 1536), (32, 256, 768))
    written = f"[written(*size, model, {target}, q) for *size, q in {hidden} for model in TYPES]"
    calls = (
        f"attention(*size, model, {target}, splits, tiles) for size in ((64, 512), (32, 256)) "
        "for model in TYPES for splits in (1, 8) for tiles in (False, True)"
    )
    assert_fits(f"{_TILE}{written}\n", calls)
