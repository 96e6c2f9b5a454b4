"""Triton kernels, each against its twin in torch, and the engine on them against itself without.

On a GPU they run compiled. Where there is none, TRITON_INTERPRET is set before triton is imported (conftest.py), and
that they compile for a GPU is a test of its own.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_rlhf.generation import ops
from hybrid_rlhf.generation.architecture.hugging_face import describe
from hybrid_rlhf.generation.batching import workspace
from hybrid_rlhf.generation.model.layers import Norm, norm_heads
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops import gpu as kernels
from hybrid_rlhf.generation.ops.rows import ACTIVATIONS, rotated
from hybrid_rlhf.runtime.world import default_device
from tests.generation.references import assert_fits, exact_attention
from tests.support.families import variant
from tests.support.generation import PROMPTS, SAMPLED, STOP_TOKEN_IDS, completions_alone, engine_of, token_ids_of
from tests.support.marks import faults
from tests.support.triton_kernels import HALF, compiled

pytest.importorskip("triton")
DEVICE = default_device()
CLOSE = {torch.float32: {"atol": 2e-6, "rtol": 1e-5}, HALF: {"atol": 2e-2, "rtol": 2e-2}}


def named(names: str, mark: pytest.MarkDecorator) -> list[Any]:
    """Parameters of families, separated by commas, with a mark."""
    return [pytest.param(name.strip(), marks=mark) for name in names.split(",")]


@pytest.mark.parametrize("width", [0, 10, 24])
def test_queries_and_keys_are_rotated_and_written_as_torch_does(width: int, on_the_device: None) -> None:
    """To a part of the cache, which other layers share."""
    torch.manual_seed(0)
    qkv, places, angles = torch.randn(5, 7 + 2 * 2, 24), torch.tensor([3, 40, 17, 0, 21]), torch.randn(5, 1, width // 2)
    table = torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)
    stores = torch.zeros(2, 3, 16, 2, 2, 24)
    found = kernels.rotate_and_write(qkv, table if width else None, places, *stores[:, :, :, 1])
    qk, values = qkv.split([9, 2], dim=1)
    queries, keys = (rotated(qk, *table) if width else qk).split([7, 2], dim=1)
    torch.testing.assert_close(found, queries)
    expected = torch.zeros_like(stores).flatten(1, 2)
    expected[:, places, 1] = torch.stack([keys, values])
    torch.testing.assert_close(stores.flatten(1, 2), expected)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_parts_of_a_row_combine_to_the_whole(
    splits: int, dtype: torch.dtype, with_sinks: bool, monkeypatch: pytest.MonkeyPatch, on_the_device: None
) -> None:
    monkeypatch.setattr(ops.attention, "splits_of", lambda programs, capacity: (splits, 16))
    torch.manual_seed(0)
    assert_attends(24, 3, dtype, **({"sinks": torch.randn(6)} if with_sinks else {}))


@pytest.mark.parametrize("capacity", [1024, 8192, 32_768])
@pytest.mark.parametrize("programs", [1, 4, 32, 256, 512, 1024, 4096])
def test_long_tables_start_no_more_than_two_waves_of_programs(programs: int, capacity: int) -> None:
    """256 rows of 4 KV heads started 16,384 programs for a capacity of 8k, and 32,768 for 32k."""
    splits, _ = ops.attention.splits_of(programs, capacity)
    wave = 2 * ops.attention._multiprocessors()
    assert programs * splits <= max(programs, 2 * wave), "one part of each row, or two waves"
    assert programs * splits >= min(wave, programs * min(32, capacity // 512)), "few rows fill the GPU"


# Head sizes, and numbers of queries per KV head at each, of published models of the family table. For models with
# latents, the plain form of prompts; the absorbed form is in test_latent_kernels.py.
SHAPES = {
    64: (1, 2, 3, 4, 7, 8, 16, 29, 71),
    80: (1, 4),
    96: (1, 2),
    100: (1,),
    120: (4,),
    128: (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20),
    160: (4,),
    192: (1, 12),
    256: (1, 2, 4, 6, 8, 16),
    512: (4, 8),
}


@pytest.mark.parametrize(
    ("d", "group", "dtype"),
    [
        *((d, max(groups), torch.float32) for d, groups in SHAPES.items()),
        *((d, 3, HALF) for d in (64, 160)),
        *(faults(d, group, HALF) for d, groups in SHAPES.items() for group in groups),
    ],
)
def test_rows_and_chunks_of_every_head_and_group_size(
    d: int, group: int, dtype: torch.dtype, on_the_device: None
) -> None:
    """Those of the family table."""
    torch.manual_seed(0)
    assert_attends(d, group, dtype)


def assert_attends(
    d: int, group: int, dtype: torch.dtype, close: dict[str, float] | None = None, **options: Any
) -> None:
    """A long and a short row, a chunk and the first tokens of a sequence, in one launch."""
    keys, values = torch.randn(2, 40, 16, 2, d).to(dtype)
    pages, positions = torch.randperm(40).int().view(4, 10), torch.tensor([150, 3])
    starts, lengths = [20, 0], [11, 3]
    queries = torch.randn(2 + sum(lengths), 2 * group, d).to(dtype)
    tiles = kernels.chunk_tiles(2, starts, lengths, tokens=kernels.tokens_at_once(group, d, dtype))
    assert sum(count for *_, count in tiles) == sum(lengths)
    options["scale"] = d**-0.5
    found = kernels.paged_attention(
        queries, keys, values, pages, positions, tiles=torch.tensor(tiles, dtype=torch.int32), **options
    )
    tokens = [(0, 150), (1, 3), *((2, 20 + i) for i in range(11)), *((3, i) for i in range(3))]
    expected = exact_attention(queries, keys, values, pages, tokens, **options)
    torch.testing.assert_close(found.double(), expected, **(close or CLOSE[dtype]))


@pytest.mark.parametrize(
    "options",
    [{"window": 40}, {"window": 40, "chunked": True}, {"softcap": 2.0}, {"bias": 160}, {"window": 9, "softcap": 2.0}],
    ids=str,
)
def test_rows_and_chunks_with_windows_caps_and_biases(options: dict[str, Any], on_the_device: None) -> None:
    torch.manual_seed(0)
    given = {**options, "bias": torch.randn(6, options["bias"])} if "bias" in options else options
    assert_attends(24, 3, torch.float32, {"atol": 1e-5, "rtol": 1e-4}, **given)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_is_activated_and_multiplied(activation: str, on_the_device: None) -> None:
    torch.manual_seed(0)
    both = torch.randn(5, 2 * 1100)
    gate, up = both.chunk(2, dim=-1)
    activate = ACTIVATIONS[activation]
    torch.testing.assert_close(kernels.gated(both, activation), activate(gate) * up)


@pytest.mark.parametrize("name", ["llama with biases", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_residual_is_added_in_the_norm(name: str, dtype: torch.dtype, everywhere: None, on_the_device: None) -> None:
    torch.manual_seed(0)
    x, delta = torch.randn(2, 7, 50).to(dtype)
    norm = Norm(torch.randn(50).to(dtype), None, describe(variant(name))[0])
    added, normed = norm.after_adding(x, delta)
    assert torch.equal(added, x + delta)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(normed, plain(norm)(added), atol=tolerance, rtol=tolerance)


def plain(norm: Norm) -> Norm:
    """The same by torch."""
    other = copy.copy(norm)
    other._kernels = None
    return other


@pytest.mark.parametrize("name", ["llama with biases", "gemma2"])
@pytest.mark.parametrize("normed", ["q", "qk", "qkv", "qv"])
def test_heads_are_normed(name: str, normed: str, everywhere: None, on_the_device: None) -> None:
    """Also those of a tensor that has gates behind them."""
    architecture, _ = describe(variant(name))
    torch.manual_seed(0)
    qkv = torch.randn(5, 9, 24).split([7, 2], dim=1)[0]
    norms = [Norm(torch.randn(24), None, architecture) if part in normed else None for part in "qkv"]
    expected = norm_heads(qkv, *[norm and plain(norm) for norm in norms], kv_heads=2)
    torch.testing.assert_close(norm_heads(qkv, *norms, kv_heads=2), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5",
        *named("gpt_oss", pytest.mark.slow),
        *named("deepseek_v3", pytest.mark.faults),
        *named("llama of three heads, gemma2, gemma4 that shares keys, qwen3_moe, granite 4", pytest.mark.faults),
        *named("jamba, mistral, gemma3, qwen3, falcon rw, opt, pythia, gemma4, bloom, llama4", pytest.mark.faults),
        *named("llama4 in one chunk, gemma4 whose keys are values, deepseek_v2, minicpm3", pytest.mark.faults),
        *named("mixtral, qwen2_moe, gemma4 with experts, granitemoe, granitemoeshared", pytest.mark.faults),
        *named("ernie4_5_moe, nemotron_h, phimoe that mixes near experts, qwen3_next, bamba", pytest.mark.faults),
        *named("falcon_h1, lfm2, lfm2_moe, minimax, falcon_h1 with a norm after the gate", pytest.mark.faults),
    ],
)
def test_a_family_samples_with_kernels_what_it_does_without(
    name: str, everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows beside chunks, as one prompt is long; packed products would come before the kernels of experts."""
    monkeypatch.setattr(choice, "can_pack", lambda device, dtype: False)
    # torch's grouped product in float32 copies to the host, which a CUDA graph cannot
    monkeypatch.setattr(workspace._Graphs, "__call__", lambda self, step, batch: step(batch).clone())
    model, sampling, found = variant(name).to(DEVICE), replace(SAMPLED, max_new_tokens=3, n=1), []
    for used in (kernels, None):
        monkeypatch.setattr(choice, "kernels_for", lambda device, dtype, used=used: used)
        engine = engine_of(model, STOP_TOKEN_IDS, max_batch_rows=4, prefill_tokens=25)
        assert engine.backend.decoder.kernels is used
        found.append(token_ids_of(engine.generate(PROMPTS[:3], sampling)))
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_step_may_be_looked_at_late(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: padded batches, and rows that have ended take part in one step more."""
    expected, sizes = completions_alone(), []

    def padded(self: workspace.Workspace, batch: int, **_: object) -> workspace.Fetch:
        self.steps_in_flight = 1
        rows = workspace._graph_rows(batch, self.most_rows)
        sizes.append(rows)
        return self.step(rows)[:, :batch].clone().numpy

    monkeypatch.setattr(workspace.Workspace, "decode", padded)
    engine = engine_of(stop=STOP_TOKEN_IDS, max_batch_rows=rows)
    assert token_ids_of(engine.generate(PROMPTS, SAMPLED)) == expected
    assert sizes


_OFFSETS = """
code = built(rows._rotate_and_write_kernel, dict(HEADS=64, D=128, D_PAD=128, WIDTH=128)).asm["ttir"]
steps = [line for line in code.splitlines() if "tt.addptr %queries" in line or "tt.addptr %qkv" in line]
print(json.dumps([line.split(":")[-1].split("loc(")[0] for line in steps]))
"""


@pytest.mark.slow
def test_queries_of_many_tokens_are_written_where_they_are_read() -> None:
    """Offsets in [T, A, D] exceed int32 at 262,144 tokens of 64 heads of 128 dimensions."""
    types = compiled(_OFFSETS)
    assert types and all("i64" in offset for offset in types), types


_ATTENTION = """
def attention(*given, **options):
    return build_attention(*given, **options).metadata.shared

def build_attention(
    d, model, target=90, group=7, splits=8, tiles=False, cap=False, bias=False, window=False, sinks=False
):
    pad = max(16, triton.next_power_of_2(d))
    queries = heads.queries_at_once(group, pad, TYPES[model]) if tiles else max(16, triton.next_power_of_2(group))
    constants = dict(N=16, G=group, QUERIES=queries, D=d, D_PAD=pad, KEYS=heads.keys_at_once(pad, TYPES[model]),
                     SPLITS=splits, SPAN=128, TILES=tiles, CAP=cap, BIAS=bias, WINDOW=window, SINKS=sinks)
    return built(heads._attention_kernel, constants, model, target)
"""

_ALL = (
    _ATTENTION
    + """
def compile_all(target, sizes):
    def compiled(kernel, model="*bf16", **constants):
        shared_bytes(kernel, constants, model, target)
    for d in sizes:
        head = dict(D=d, D_PAD=triton.next_power_of_2(d))
        for width in (0, d, d // 4 * 2):
            compiled(rows._rotate_and_write_kernel, HEADS=14, WIDTH=width, **head)
        compiled(heads._combine_kernel, SPLITS=8, **head)
    for splits, tiles in ((1, False), (8, False), (1, True), (8, True)):
        for flags in ((0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 0), (0, 0, 1, 1)):
            attention(80, "*bf16", target, 7, splits, tiles, *map(bool, flags))
    for in_float32 in (False, True):
        for add in (False, True):
            compiled(norms._norm_kernel, IN_FLOAT32=in_float32, ADD=add, WIDTH=896, PAD=1024)
    for activation in range(4):
        compiled(rows._gated_kernel, ACTIVATION=activation, BLOCK=1024)
    blocks = dict(BLOCK=1024, C_PAD=256)
    table = dict(COLUMNS=2 * 4096 + 8)
    for model in TYPES:
        for scores, penalty, stops, cleared in ((False, False, 0, 0), (True, False, 0, 64), (True, True, 3, 64)):
            flags = dict(SCORES=scores, PENALTY=penalty, BIAS=penalty, GRAMMAR=penalty, STOPS=stops, CLEARED=cleared)
            compiled(sampling._weigh_kernel, model, BLOCK=1024, **flags, **table)
            flags = dict(SCORES=scores, SEEN=penalty, BIAS=penalty, BOUNDS=scores, MIN_P=penalty)
            compiled(sampling._draw_kernel, model, **blocks, **flags)
    compiled(sampling._count_kernel, **blocks, **table)
    for bounds, min_p in ((True, False), (False, True), (True, True)):
        compiled(sampling._truncate_kernel, **blocks, **table, MOST=4096, BOUNDS=bounds, MIN_P=min_p)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "sizes"),
    [(90, [80, 256]), *(faults(target, [*SHAPES]) for target in (80, 90, 100))],
)
def test_the_kernels_compile_for_a_gpu(target: int, sizes: list[int]) -> None:
    """All the way to machine code, for compute capabilities times ten."""
    assert compiled(f"{_ALL}compile_all({target}, {sizes})\nprint(json.dumps('compiled'))") == "compiled"


LARGE = (64, 128, 256, 512)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "every"), [(90, False), *(faults(x, True) for x in (80, 90, 100))])
def test_attention_of_every_head_and_group_size_fits_into_shared_memory(target: int, every: bool) -> None:
    """Rows and chunks; rows alone have smaller tiles of queries. A part has the largest group of some head sizes, the
    tiles of which are largest."""
    groups = {d: tuple(known) if every else (max(known),) for d, known in SHAPES.items() if every or d in LARGE}
    shapes = [(d, model, group) for d in groups for model in ("*bf16", "*fp32") for group in groups[d]]
    assert_fits(_ATTENTION, f"attention(d, model, {target}, group, tiles=True) for d, model, group in {shapes}")


@pytest.mark.slow
def test_chunks_use_the_newest_instructions_of_tensor_cores_up_to_head_size_256() -> None:
    """Tiles of 32 queries, as head size 256 had, compile to mma.sync alone."""
    calls = "'wgmma' in build_attention(d, '*bf16', 90, 2, 1, True).asm['ptx'] for d in (128, 256)"
    assert compiled(f"{_ATTENTION}print(json.dumps([{calls}]))") == [True, True]
