"""Triton kernels, each against its twin in torch, and the engine on them against itself without.

On a GPU they run compiled. Where there is none, TRITON_INTERPRET is set before triton is imported (conftest.py), and
that they compile for a GPU is a test of its own. The interpreter truncates to bfloat16: float16 stands for it here,
and tests/gpu compares bfloat16.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.batching import workspace
from hybrid_rlhf.generation.batching.cache import BLOCK_TOKENS, CacheLayout, KVCache
from hybrid_rlhf.generation.model import decoder, layers
from hybrid_rlhf.generation.model.attention import Attention, DecodeRows
from hybrid_rlhf.generation.model.layers import ACTIVATIONS, Norm
from hybrid_rlhf.generation.weights.describe import describe
from hybrid_rlhf.generation.weights.split import Split
from hybrid_rlhf.runtime.world import default_device
from tests.support.families import variant
from tests.support.generation import PROMPTS, SAMPLED, STOP_TOKEN_IDS, completions_alone, token_ids_of
from tests.support.tiny import tiny_model

pytest.importorskip("triton")
kernels = importlib.import_module("hybrid_rlhf.generation.model.kernels")
DEVICE = default_device()


@pytest.fixture
def on_the_device() -> Iterator[None]:
    """Tensors of a test are made where the kernels run."""
    with DEVICE:
        yield


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels on the CPU too."""
    for module in (decoder, layers):
        monkeypatch.setattr(module, "kernels_for", lambda device, dtype: kernels)
    yield


@pytest.mark.parametrize(
    "name", ["llama with biases", "mistral", "gemma2", "bloom", "falcon rw", "gpt2", "pythia", "phi3"]
)
@pytest.mark.parametrize("capacity", [40, 300])
def test_a_step_attends_and_writes_as_torch_does(name: str, capacity: int, on_the_device: None) -> None:
    architecture, _ = describe(variant(name))
    split = Split.of(architecture, 0, 1)
    torch.manual_seed(0)
    layout = CacheLayout.of(architecture, capacity)
    blocks = -(-capacity // BLOCK_TOKENS)
    sizes = {"kv_heads": len(split.kv_heads), "head_dim": architecture.head_dim}
    caches = [
        KVCache(layout, pages=3 * layout.tables * blocks, **sizes, dtype=torch.float32, device=DEVICE) for _ in "ab"
    ]
    for store in ("keys", "values"):
        filled = torch.randn_like(caches[0].keys)
        for cache in caches:
            getattr(cache, store).copy_(filled)
    pages = torch.randperm(caches[0].pages).int().view(layout.tables, 3, blocks)
    positions = torch.tensor([capacity - 1, 0, capacity // 2])
    qkv = torch.randn(3, len(split.heads) + 2 * len(split.kv_heads), architecture.head_dim)
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
        attend = attention.step(DecodeRows(pages, positions, capacity))
        mixed.append([attend(layer, qkv, table, None) for layer in range(architecture.layers)])
    torch.testing.assert_close(mixed[1], mixed[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(caches[1].keys, caches[0].keys)
    assert torch.equal(caches[1].values, caches[0].values)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_parts_of_a_row_combine_to_the_whole(
    splits: int, dtype: torch.dtype, with_sinks: bool, monkeypatch: pytest.MonkeyPatch, on_the_device: None
) -> None:
    monkeypatch.setattr(kernels, "_splits", lambda programs, capacity: splits)
    torch.manual_seed(0)
    queries, (keys, values) = torch.randn(3, 6, 24).to(dtype), torch.randn(2, 140, 16, 2, 24).to(dtype)
    positions, pages = torch.tensor([699, 3, 200]), torch.randperm(140)[:132].int().view(3, 44)
    sinks = torch.randn(6) if with_sinks else None
    found = kernels.paged_attention(queries, keys, values, pages, positions, scale=0.2, sinks=sinks)
    for row, position in enumerate(positions.tolist()):
        k, v = (
            x[pages[row].long()].flatten(0, 1)[: position + 1].double().repeat_interleave(3, dim=1).transpose(0, 1)
            for x in (keys, values)
        )
        scores = (queries[row, :, None].double() @ k.transpose(1, 2))[:, 0] * 0.2
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].double()], dim=1)
        expected = (scores.softmax(dim=1)[:, None, : position + 1] @ v)[:, 0]
        close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
        torch.testing.assert_close(found[row].double(), expected, **close)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_is_activated_and_multiplied(activation: str, on_the_device: None) -> None:
    torch.manual_seed(0)
    both = torch.randn(5, 2 * 1100)
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(kernels.gated(both, activation), ACTIVATIONS[activation](gate) * up)  # type: ignore[index]


@pytest.mark.parametrize("name", ["llama with biases", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_residual_is_added_in_the_norm(name: str, dtype: torch.dtype, everywhere: None, on_the_device: None) -> None:
    architecture, _ = describe(variant(name))
    torch.manual_seed(0)
    x, delta = torch.randn(2, 7, 50).to(dtype)
    norm = Norm(torch.randn(50).to(dtype), None, architecture)
    added, normed = norm.after_adding(x, delta)
    assert torch.equal(added, x + delta)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(normed, norm(added), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "name",
    ["llama of three heads", "mistral", "gemma2", "gemma3", "qwen3", "gpt_oss", "bloom", "falcon rw", "opt", "pythia"],
)
def test_a_family_samples_with_kernels_what_it_does_without(
    name: str, everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampling = variant(name).to(DEVICE), replace(SAMPLED, max_new_tokens=3)
    found = token_ids_of(
        GenerationEngine.from_model(model, stop_token_ids=STOP_TOKEN_IDS).generate(PROMPTS[:3], sampling)
    )
    for module in (decoder, layers):
        monkeypatch.setattr(module, "kernels_for", lambda device, dtype: None)
    assert found == token_ids_of(
        GenerationEngine.from_model(model, stop_token_ids=STOP_TOKEN_IDS).generate(PROMPTS[:3], sampling)
    )


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_step_may_be_looked_at_late(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: padded batches, and rows that have ended take part in one step more."""
    expected, sizes = completions_alone(), []

    def padded(self: workspace.Workspace, batch: int, *, longest: int, drafts: None) -> workspace.Fetch:
        self.steps_in_flight = 1
        rows = workspace._graph_rows(batch, self.most_rows)
        sizes.append(rows)
        return self.step(rows)[:, :batch].clone().tolist

    monkeypatch.setattr(workspace.Workspace, "decode", padded)
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=STOP_TOKEN_IDS, max_batch_rows=rows)
    assert token_ids_of(engine.generate(PROMPTS, SAMPLED)) == expected
    assert sizes


def test_sizes_of_batch_are_few_and_never_too_small() -> None:
    for most in (1, 7, 100, 1000):
        rungs = [workspace._graph_rows(rows, most) for rows in range(1, most + 1)]
        assert all(rows <= rung <= most for rows, rung in enumerate(rungs, start=1))
        assert rungs == sorted(rungs) and len(set(rungs)) <= 45


_COMPILE = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hybrid_rlhf.generation.model import kernels

TYPES = {"*bf16": torch.bfloat16, "*fp32": torch.float32}

def shared_bytes(kernel, constants, floats=(), model="*bf16"):
    pointers = {"positions": "*i64", "places": "*i64", "pages": "*i32"}
    pointers |= {"tops": "*fp32", "sums": "*fp32", "bias": "*fp32", "sinks": "*fp32"}
    scalars = {"scale", "cap", "eps"}
    counts = {"window", "kv_heads", "row_pages", "bias_keys", "width"}
    signature = {}
    for name in kernel.arg_names:
        if name in constants: signature[name] = "constexpr"
        elif name in scalars: signature[name] = "fp32"
        elif name in counts: signature[name] = "i32"
        else: signature[name] = "*fp32" if name in floats else pointers.get(name, model)
    # as at run time: what is a multiple of 16 is loaded ahead into shared memory
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
               if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).metadata.shared

def attention(d, model, splits=8, cap=False, bias=False, window=False, sinks=False):
    pad = max(16, triton.next_power_of_2(d))
    constants = dict(N=16, G=7, G_PAD=16, D=d, D_PAD=pad, KEYS=kernels.keys_at_once(pad, TYPES[model]), SPLITS=splits,
                     CAP=cap, BIAS=bias, WINDOW=window, SINKS=sinks)
    floats = ("out",) if splits > 1 else ()
    return shared_bytes(kernels._decode_attention_kernel, constants, floats, model)
"""

_ALL = """
for width in (0, 64, 16):
    shared_bytes(kernels._rotate_and_write_kernel, dict(HEADS=14, D=64, D_PAD=64, WIDTH=width))
for splits in (1, 8):
    for flags in ((0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 0), (0, 0, 1, 1)):
        attention(80, "*bf16", splits, *map(bool, flags))
shared_bytes(kernels._combine_kernel, dict(D=80, D_PAD=128, SPLITS=8), floats=("parts",))
for in_float32 in (False, True):
    shared_bytes(kernels._add_rms_norm_kernel, dict(WIDTH=896, PAD=1024, IN_FLOAT32=in_float32))
for activation in range(4):
    shared_bytes(kernels._gated_kernel, dict(ACTIVATION=activation, BLOCK=1024))
print(json.dumps("compiled"))
"""


def compiled(script: str) -> Any:
    """What a script prints as JSON, in a process without the interpreter; no GPU is needed to compile for one."""
    run = subprocess.run(
        [sys.executable, "-c", _COMPILE + script],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/tmp"), "PYTHONPATH": os.getcwd()},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu() -> None:
    """For sm_90, all the way to machine code."""
    assert compiled(_ALL) == "compiled"


HEAD_DIMS = {
    64: "Llama 3.2 1B, Qwen2.5 0.5B, SmolLM2, GPT-2, OPT 125M, Pythia 160M, BLOOM 560M, Falcon 7B",
    80: "OPT 2.7B, Pythia 2.8B, BLOOM 3B",
    96: "Phi-3 mini, GPT-NeoX 20B, BLOOM 1.1B",
    128: "Llama 3, Mistral, Qwen2.5 and Qwen3, Gemma 2 27B, OPT 6.7B, Pythia 6.9B, BLOOM 7B, Falcon 11B",
    256: "Gemma 2 2B and 9B, Gemma 3, Pythia 1B",
}
"""Of the models in the family table."""
LEAST_SHARED_BYTES = 101_376
"""What a program may take on sm_86 and sm_89; sm_80 has 166,912, sm_90 has 232,448."""


@pytest.mark.slow
def test_attention_of_every_head_size_fits_into_shared_memory() -> None:
    pairs = [(d, model) for d in HEAD_DIMS for model in ("*bf16", "*fp32")]
    found = compiled(f"print(json.dumps([attention(d, model) for d, model in {pairs}]))")
    taken = dict(zip(pairs, found, strict=True))
    assert all(0 < taken[pair] <= LEAST_SHARED_BYTES for pair in pairs), taken


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_keys_have_a_size_that_triton_multiplies(d: int, dtype: torch.dtype) -> None:
    keys = kernels.keys_at_once(1 << (d - 1).bit_length(), dtype)
    assert keys in (16, 32, 64)
    assert keys == 16 or keys * (1 << (d - 1).bit_length()) * dtype.itemsize <= 16 * 1024
