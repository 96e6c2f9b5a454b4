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
from hybrid_rlhf.generation.architecture.model_description import Split
from hybrid_rlhf.generation.batching import workspace
from hybrid_rlhf.generation.model.attention import Attention, Chunks, DecodeRows
from hybrid_rlhf.generation.model.cache import BLOCK_TOKENS, CacheLayout, KVCache
from hybrid_rlhf.generation.model.layers import Norm, norm_heads
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops import gpu as kernels
from hybrid_rlhf.generation.ops.rows import ACTIVATIONS
from hybrid_rlhf.runtime.world import default_device
from tests.generation.references import exact_attention
from tests.support.families import variant
from tests.support.generation import PROMPTS, SAMPLED, STOP_TOKEN_IDS, completions_alone, engine_of, token_ids_of
from tests.support.marks import faults
from tests.support.triton_kernels import HALF, LEAST_SHARED_BYTES, compiled

pytest.importorskip("triton")
DEVICE = default_device()
CLOSE = {torch.float32: {"atol": 2e-6, "rtol": 1e-5}, HALF: {"atol": 2e-2, "rtol": 2e-2}}


def named(names: str, mark: pytest.MarkDecorator) -> list[Any]:
    """Parameters of families, separated by commas, with a mark."""
    return [pytest.param(name.strip(), marks=mark) for name in names.split(",")]


@pytest.mark.parametrize(
    "name",
    [
        *("bloom", "llama4"),
        *named("gemma2", pytest.mark.slow),
        *named("gpt2, pythia, llama with biases, mistral, falcon rw, phi3", pytest.mark.faults),
    ],
)
@pytest.mark.parametrize(
    ("capacity", "starts", "lengths"),
    [
        faults(40, [], []),
        (40, [0, 2], [3, 20]),
        faults(300, [0, 21], [17, 40]),
    ],
)
def test_a_step_attends_and_writes_as_torch_does(
    name: str, capacity: int, starts: list[int], lengths: list[int], on_the_device: None
) -> None:
    """Rows alone, and with chunks; an engine computes chunks alone in its first step."""
    architecture, _ = describe(variant(name))
    split = Split.of(architecture, 0, 1)
    torch.manual_seed(0)
    layout = CacheLayout.of(architecture, split, capacity)
    blocks = -(-capacity // BLOCK_TOKENS)
    sequences = 3 + len(starts)
    caches = [
        KVCache(layout, pages=sequences * layout.tables * blocks, dtype=torch.float32, device=DEVICE) for _ in "ab"
    ]
    for store in ("keys", "values"):
        filled = torch.randn_like(caches[0].keys)
        for cache in caches:
            getattr(cache, store).copy_(filled)
    pages = torch.randperm(caches[0].pages).int().view(layout.tables, sequences, blocks)
    at = torch.tensor([capacity - 1, 0, capacity // 2])
    positions = torch.cat([at, *(start + torch.arange(length) for start, length in zip(starts, lengths, strict=True))])
    qkv = torch.randn(len(positions), len(split.heads) + 2 * len(split.kv_heads), architecture.head_dim)
    rotary = architecture.kinds[0].rotary
    table = None
    if rotary is not None:
        angles = torch.cat([positions[:, None, None] * rotary.inv_freq.to(DEVICE)] * 2, dim=-1)
        signs = torch.ones(angles.shape[-1])
        signs[: len(signs) // 2] = -1
        table = (angles.cos(), angles.sin() * signs)
    mixed = []
    for cache, used in zip(caches, (None, kernels), strict=True):
        attention = Attention(architecture, split, cache, capacity_tokens=capacity, kernels=used)
        chunks = Chunks(pages[:, 3:, :4], starts, lengths) if starts else None
        attend = attention.step(DecodeRows(pages[:, :3], at, capacity), chunks)
        mixed.append([attend(layer, qkv, table, None) for layer in range(architecture.layers)])
    torch.testing.assert_close(mixed[1], mixed[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(caches[1].keys, caches[0].keys)
    assert torch.equal(caches[1].values, caches[0].values)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_parts_of_a_row_combine_to_the_whole(
    splits: int, dtype: torch.dtype, with_sinks: bool, monkeypatch: pytest.MonkeyPatch, on_the_device: None
) -> None:
    monkeypatch.setattr(ops.attention, "splits_of", lambda programs, capacity: (splits, 16))
    torch.manual_seed(0)
    queries, (keys, values) = torch.randn(3, 6, 24).to(dtype), torch.randn(2, 140, 16, 2, 24).to(dtype)
    positions, pages = torch.tensor([699, 3, 200]), torch.randperm(140)[:132].int().view(3, 44)
    sinks = torch.randn(6) if with_sinks else None
    found = kernels.paged_attention(queries, keys, values, pages, positions, scale=0.2, sinks=sinks)
    rows = enumerate(positions.tolist())
    expected = exact_attention(queries, keys, values, pages, rows, scale=0.2, sinks=sinks)
    torch.testing.assert_close(found.double(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("capacity", [1024, 8192, 32_768])
@pytest.mark.parametrize(("rows", "kv_heads"), [(1, 1), (1, 4), (8, 4), (64, 4), (128, 4), (256, 4), (4096, 1)])
def test_long_tables_start_no_more_than_two_waves_of_programs(
    rows: int, kv_heads: int, capacity: int, latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 rows of 4 KV heads started 16,384 programs for a capacity of 8k, and 32,768 for 32k."""
    grids: list[tuple[int, ...]] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *given, **constants: None

    pages, positions = torch.zeros(rows, capacity // 16).int(), torch.zeros(rows).long()
    if latent:
        module, heads = ops.latent, 16 * kv_heads
        monkeypatch.setattr(module, "_latent_kernel", Launch())
        monkeypatch.setattr(module, "combine", lambda *parts: None)
        given = torch.zeros(rows, heads, 16), torch.zeros(rows, heads, 16), torch.zeros(heads, 8, 16)
        kernels.latent_attention(*given, None, torch.zeros(1, 16, 1, 24), pages, positions, scale=1.0)
    else:
        for name in ("_attention_kernel", "_combine_kernel"):
            monkeypatch.setattr(ops.attention, name, Launch())
        keys = torch.zeros(1, 16, kv_heads, 16)
        kernels.paged_attention(torch.zeros(rows, 2 * kv_heads, 16), keys, keys, pages, positions, scale=1.0)
    programs, wave = grids[0][0] * grids[0][1], 2 * ops.attention._multiprocessors()
    assert programs <= max(rows * kv_heads, 2 * wave), "one part of each row, or two waves"
    assert programs >= min(wave, rows * kv_heads * min(32, capacity // 512)), "few rows fill the GPU"


SHAPES = {
    64: {
        1: "GPT-2, OPT 125M, Pythia 160M, BLOOM 560M, SmolLM2 1.7B, StableLM 2 1.6B, Phi-1.5",
        2: "Granite 3 1B-A400M, LFM2 350M",
        3: "SmolLM2 135M, Granite 3 3B-A800M",
        4: "Llama 3.2 1B, Granite 3 2B, EXAONE 4 1.2B, LFM2 1.2B, Falcon-H1 0.5B",
        7: "Qwen2.5 0.5B",
        8: "gpt-oss, TinyLlama",
        16: "Falcon 40B",
        29: "Falcon 180B",
        71: "Falcon 7B",
    },
    80: {1: "OPT 2.7B, Pythia 2.8B, BLOOM 3B, Phi-2, StableLM 3B", 4: "H2O Danube 1.8B"},
    96: {1: "Phi-3 mini, GPT-NeoX 20B, BLOOM 1.1B", 2: "H2O Danube 3 500M"},
    100: {1: "OpenLLaMA 3B"},
    120: {4: "H2O Danube 3 4B"},
    128: {
        1: "Llama 2 7B, OLMo 2 7B, OLMoE, Qwen1.5-MoE, Helium, OPT 6.7B, Pythia 6.9B, BLOOM 7B",
        2: "Qwen3 0.6B, Gemma 2 27B, Gemma 3 27B",
        3: "Llama 3.2 3B, Phi-4 mini, Minitron 4B, Granite 4 tiny",
        4: "Llama 3 8B, Mistral, Mixtral, Qwen3 4B, Jamba, Bamba, SmolLM3, Phi-MoE, Nemotron-H 8B, Falcon 11B",
        5: "Qwen3 14B, Llama 4, OLMo 3 32B, EXAONE 4 32B, ERNIE 4.5 21B, Arcee, Falcon-H1 3B",
        6: "Qwen2.5 1.5B, Mixtral 8x22B, GLM-4 32B, CWM, Falcon-H1 7B",
        7: "Qwen2.5 7B, Qwen2-MoE 57B",
        8: "Llama 3 70B, Qwen3 32B, Qwen3-MoE 30B, MiniMax",
        9: "StarCoder2 7B",
        10: "Seed-OSS",
        12: "GLM-4.5, Command R+ and A, StarCoder2 3B and 15B",
        16: "GLM-4 9B, InternLM3, Qwen3-MoE 235B, Llama 3 405B, Nemotron 3 Nano",
        20: "Jamba 3B",
    },
    160: {4: "StableLM 2 12B"},
    192: {1: "DeepSeek V2 and V3, Youtu: prompts", 12: "Nemotron-4 340B"},
    256: {
        1: "Gemma 7B, Pythia 1B, GLM-4.7 Flash: prompts",
        2: "Gemma 2 2B and 9B, Gemma 3 4B and 12B, Gemma 4 31B",
        4: "Gemma 3 1B, Qwen3.5 9B",
        6: "Qwen3.5 27B",
        8: "Gemma 2B, Qwen3-Next 80B, Qwen3.5 35B-A3B",
        16: "Qwen3.5 397B-A17B",
    },
    512: {4: "Gemma 4 E4B, its layers without a window", 8: "Gemma 4 E2B, 26B-A4B and 31B, as before"},
}
"""Head sizes, and queries of a KV head at each, of published models of the family table; of those with latents,
the plain form of prompts, while the absorbed one is in test_latent_kernels.py."""


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
    """Those of the family table, in one launch: a long and a short row, a chunk and the first tokens of a sequence."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 40, 16, 2, d).to(dtype)
    pages, positions = torch.randperm(40).int().view(4, 10), torch.tensor([150, 3])
    starts, lengths = [20, 0], [11, 3]
    queries = torch.randn(2 + sum(lengths), 2 * group, d).to(dtype)
    tiles = kernels.chunk_tiles(2, starts, lengths, tokens=kernels.tokens_at_once(group, d, dtype))
    assert sum(count for *_, count in tiles) == sum(lengths)
    found = kernels.paged_attention(
        queries, keys, values, pages, positions, scale=d**-0.5, tiles=torch.tensor(tiles, dtype=torch.int32)
    )
    tokens = [(0, 150), (1, 3), *((2, 20 + i) for i in range(11)), *((3, i) for i in range(3))]
    expected = exact_attention(queries, keys, values, pages, tokens, scale=d**-0.5)
    torch.testing.assert_close(found.double(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_is_activated_and_multiplied(activation: str, on_the_device: None) -> None:
    torch.manual_seed(0)
    both = torch.randn(5, 2 * 1100)
    gate, up = both.chunk(2, dim=-1)
    activate = ACTIVATIONS[activation]  # type: ignore[index]
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
        return self.step(rows)[:, :batch].clone().tolist

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
    calls = f"attention(d, model, {target}, group, tiles=True) for d, model, group in {shapes}"
    taken = dict(zip(shapes, compiled(f"{_ATTENTION}print(json.dumps([{calls}]))"), strict=True))
    assert all(0 < taken[shape] <= LEAST_SHARED_BYTES for shape in shapes), taken


@pytest.mark.slow
def test_chunks_use_the_newest_instructions_of_tensor_cores_up_to_head_size_256() -> None:
    """Tiles of 32 queries, as head size 256 had, compile to mma.sync alone."""
    calls = "'wgmma' in build_attention(d, '*bf16', 90, 2, 1, True).asm['ptx'] for d in (128, 256)"
    assert compiled(f"{_ATTENTION}print(json.dumps([{calls}]))") == [True, True]
