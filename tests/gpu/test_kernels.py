"""Compiled kernels against float64 at the shapes of real models: bfloat16, several splits, more than 2^31 elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.functional.masking import position_ids
from hybrid_rlhf.generation import GenerationEngine, SamplingParams, ops
from hybrid_rlhf.generation.batching.capacity import free_bytes
from hybrid_rlhf.generation.batching.sampler import DecodeBatch, Sampler, sampling_mode
from hybrid_rlhf.generation.model.layers import QuantisedLinear
from hybrid_rlhf.generation.ops import gpu as kernels
from hybrid_rlhf.generation.ops.quantisation import Quantization, quantise
from hybrid_rlhf.models.packing import pack, use_packing
from hybrid_rlhf.models.packing.attention import varlen_attention
from hybrid_rlhf.models.packing.rows import boundaries
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.runtime.world import solo_world
from tests.generation.references import exact_attention
from tests.support.families import variant
from tests.support.generation import SHORT_PROMPTS, SHORT_SAMPLED, requests_for
from tests.support.tensors import slow_varlen
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda", 0)
SHAPES = [
    *((7, 128), (7, 64), (8, 64), (71, 64), (4, 80), (1, 96), (1, 100), (4, 120), (20, 128), (4, 160), (12, 192)),
    *((2, 256), (16, 256), (8, 512)),
]
"""Queries of a KV head, and head size: all head sizes of tests/generation/test_kernels.py."""
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=GPU, dtype=dtype)


@pytest.mark.parametrize("splits", [1, 8, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("group", "d"), SHAPES)
def test_attention_of_a_step(
    group: int, d: int, dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.attention, "splits_of", lambda programs, capacity: (splits, 16))
    torch.manual_seed(0)
    rows, kv_heads, capacity = 16, 4, 4224
    keys, values = random(2, rows * capacity // 16, 16, kv_heads, d, dtype=dtype)
    pages = torch.randperm(len(keys), device=GPU).int().view(rows, -1)
    queries = random(rows, group * kv_heads, d, dtype=dtype)
    positions = torch.randint(capacity, (rows,), device=GPU)
    positions[:3] = torch.tensor([0, 63, capacity - 1], device=GPU)
    found = kernels.paged_attention(queries, keys, values, pages, positions, scale=d**-0.5)
    expected = exact_attention(queries, keys, values, pages, enumerate(positions.tolist()), scale=d**-0.5)
    torch.testing.assert_close(found.double(), expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("splits", [1, 32])
def test_a_cache_of_more_than_two_to_the_31_elements(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, kv_heads, capacity, d = 80, 8, 32768, 128
    if free_bytes(GPU) < 16 * 2**30:
        pytest.skip("needs 16 GiB")
    monkeypatch.setattr(ops.attention, "splits_of", lambda programs, capacity: (splits, 16))
    torch.manual_seed(0)
    keys, values = (random(rows * capacity // 16, 16, kv_heads, d, dtype=torch.bfloat16) for _ in "kv")
    pages = torch.arange(len(keys), device=GPU, dtype=torch.int32).view(rows, -1)
    assert keys.numel() > 2**31
    qkv = random(rows, 32 + 2 * kv_heads, d, dtype=torch.bfloat16)
    positions = torch.full((rows,), capacity - 1, device=GPU)
    places = pages[:, -1].long() * 16 + 15
    queries = kernels.rotate_and_write(qkv, None, places, keys, values)
    assert torch.equal(queries, qkv[:, :32])
    assert torch.equal(keys[pages[:, -1].long(), -1], qkv[:, 32 : 32 + kv_heads])
    assert torch.equal(values[pages[:, -1].long(), -1], qkv[:, 32 + kv_heads :])
    found = kernels.paged_attention(queries, keys, values, pages, positions, scale=d**-0.5)
    ends = [0, rows - 1]
    tokens = [(row, capacity - 1) for row in ends]
    expected = exact_attention(queries[ends], keys, values, pages, tokens, scale=d**-0.5)
    torch.testing.assert_close(found[ends].double(), expected, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("cut", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 1000, "top_p": 0.99, "min_p": 0.001}])
@pytest.mark.parametrize("vocabulary", [49_152, 152_064, 262_144])
def test_sampling_from_large_vocabularies(vocabulary: int, cut: dict[str, float]) -> None:
    """Against torch on the same device; a token may differ where a uniform number is at a boundary."""
    torch.manual_seed(0)
    asked = requests_for([SamplingParams(temperature=0.8, **cut)] * 64)  # type: ignore[arg-type]
    logits, drawn = 3 * random(64, vocabulary, dtype=torch.float32), []
    for by_kernel in (True, False):
        rows = DecodeBatch.of(asked, vocab_size=vocabulary, device=GPU)
        sampler = Sampler(vocabulary, sampling_mode(asked), solo_world(GPU))
        if not by_kernel:
            sampler._kernels = None
        drawn.append(sampler(logits, rows))
    same = drawn[0].tokens == drawn[1].tokens
    assert same.sum() >= 62
    for name in ("logprobs", "sampling_logprobs"):
        found, expected = (getattr(each, name)[same] for each in drawn)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("group", "d"), [(group, d) for group, d in SHAPES if d % 8 == 0 and d <= 256])
def test_varlen_attention_forward_and_backward(group: int, d: int, window: int | None) -> None:
    kernel = varlen_attention(GPU, torch.bfloat16, d)
    assert kernel is not None
    torch.manual_seed(0)
    lengths, more = torch.tensor([300, 1, 77, 512]), torch.tensor([0, 30, 100, 0])
    ends = boundaries(lengths).to(GPU), boundaries(lengths + more).to(GPU)
    longest = int(lengths.max()), int((lengths + more).max())
    q = random(int(lengths.sum()), 4 * group, d, dtype=torch.bfloat16)
    k, v = random(2, int((lengths + more).sum()), 4, d, dtype=torch.bfloat16)
    found, expected = [], []
    for kept, attend, dtype in ((found, kernel, torch.bfloat16), (expected, slow_varlen, torch.float64)):
        with torch.device(GPU):
            leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
            mixed = attend(*leaves, ends, longest, scale=d**-0.5, window=window)
            kept.append(mixed.detach())
            kept += torch.autograd.grad(mixed, leaves, torch.linspace(-1, 1, mixed.numel()).view_as(mixed).to(dtype))
    for one, exact in zip(found, expected, strict=True):
        # gradients of keys and values are sums over the queries of a group
        torch.testing.assert_close(one.double(), exact, atol=max(4e-2, 1e-2 * float(exact.abs().max())), rtol=4e-2)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma2"])
def test_packed_rows_in_bfloat16_are_padded_ones(name: str) -> None:
    packed, padded = (variant(name).to(GPU, torch.bfloat16) for _ in "ab")
    use_packing(packed)
    ids = torch.randint(3, 200, (5, 40), device=GPU)
    mask = torch.arange(40, device=GPU) < torch.tensor([40, 3, 17, 1, 25], device=GPU)[:, None]
    handed = pack(packed, ids, mask).arguments["attention_mask"].dtype
    assert handed == (torch.int64 if name == "gemma2" else torch.int32), "by a varlen kernel unless scores are capped"
    outputs = [Policy(model)(ids, mask, mask, 1.0)[0] for model in (packed, padded)]
    real = mask & (position_ids(mask) > 0)
    assert (outputs[0] - outputs[1])[real].abs().mean() < 0.05


def test_cudnn_attention_is_off() -> None:
    solo_world(GPU)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_draws_work_under_deterministic_algorithms() -> None:
    """cuBLAS reads CUBLAS_WORKSPACE_CONFIG when it starts, which tests/gpu/conftest.py sets before."""
    torch.use_deterministic_algorithms(True)
    try:
        for cut in ({}, {"top_p": 0.9, "repetition_penalty": 1.2, "min_new_tokens": 3}):
            sampling = replace(SHORT_SAMPLED, max_new_tokens=10, **cut)
            engines = [GenerationEngine.from_model(tiny_model().cuda(), stop_token_ids=range(3, 30)) for _ in "ab"]
            first, second = (engine.generate(SHORT_PROMPTS, sampling) for engine in engines)
            assert [[c.token_ids for c in s] for s in first] == [[c.token_ids for c in s] for s in second]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("width", [70, 512, 18_944])
def test_inputs_are_quantised_as_torch_does(width: int, kind: Quantization) -> None:
    torch.manual_seed(0)
    for x in (random(33, width, dtype=torch.bfloat16), torch.zeros(3, width, device=GPU, dtype=torch.bfloat16)):
        dtype, most = ops.quantisation.CODES[kind]
        found, scales = kernels.quantise_rows(x, dtype, most=most, smallest=ops.quantisation.SMALLEST, rows=40)
        codes, expected = quantise(x, kind)
        torch.testing.assert_close(scales, expected, rtol=1e-6, atol=0)
        assert (found[: len(x)].float() != codes.float()).float().mean() < 1e-3, "factors may differ in the last digit"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_products(kind: Quantization) -> None:
    """Against the product of what the codes stand for."""
    torch.manual_seed(0)
    weight, bias = random(256, 512, dtype=torch.bfloat16), random(256, dtype=torch.bfloat16)
    linear = QuantisedLinear(weight, bias, kind)
    for rows in (1, 16, 17, 200):
        x = random(rows, 512, dtype=torch.bfloat16)
        (codes, scale), (weight_codes, weight_scale) = quantise(x, kind), quantise(weight, kind)
        exact = (codes.double() * scale[:, None]) @ (weight_codes.double() * weight_scale[:, None]).t() + bias.double()
        torch.testing.assert_close(linear(x).double(), exact, atol=0.2, rtol=CLOSE[torch.bfloat16])
    assert float(linear.error) < 0.1
