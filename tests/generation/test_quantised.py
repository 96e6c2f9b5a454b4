"""Quantised products against integer arithmetic in torch, models with and without them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.generation import GenerationEngine, ops
from hybrid_rlhf.generation.model import layers
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.model.layers import InferenceLinear, QuantisedLinear
from hybrid_rlhf.generation.ops import cpu_kernels
from hybrid_rlhf.generation.ops import gpu as kernels
from hybrid_rlhf.generation.ops.quantisation import quantise
from hybrid_rlhf.generation.sampling import per_request
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.generation.weights.probe import check_inference_weights, probe_logprobs
from hybrid_rlhf.models.head_check import module_logprobs, probe_tokens
from hybrid_rlhf.runtime.world import solo_world
from tests.generation.references import assert_fits
from tests.support.errors import refused, user_error
from tests.support.families import variant
from tests.support.generation import SHORT_PROMPTS, SHORT_SAMPLED, token_ids_of
from tests.support.tiny import save_tiny, tiny_model
from tests.support.triton_kernels import Operations, count_launches

SHAPES = [(1, 1), (5, 3), (32, 64), (33, 70), (96, 576), (70, 1537)]
"""Outputs and inputs: of a tile, less than one, and with a remainder of both."""


@pytest.fixture(autouse=True)
def compiled_kernels() -> None:
    if not cpu_kernels.available():
        pytest.skip("the CPU kernels cannot be compiled here")
    torch.manual_seed(0)


def codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] int64 and [T, 1] float32; the product with 127 / largest is exact in float64, and rounded once."""
    largest = x.float().abs().amax(dim=1, keepdim=True)
    factor = torch.tensor(127.0) / largest  # a number over a tensor is a product with its reciprocal
    return (x.double() * factor.double()).round().long(), largest / 127.0


def expected_product(x: Tensor, weight: Tensor) -> Tensor:
    """In int64 as far as the sums."""
    codes, scales = codes_of(x)
    weight_codes, weight_scales = quantise(weight, "int8")
    return ((codes @ weight_codes.long().t()).float() * (scales * weight_scales)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_sums_are_those_of_integers(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    linear = QuantisedLinear(weight, None, "int8")
    for rows in (0, 1, 2, 3, 11, 12, 13, 25, 64):
        x = torch.randn(rows, inputs).to(dtype)
        assert torch.equal(linear(x), expected_product(x, weight)), rows


def test_weights_are_quantised_per_output_and_by_half_a_step_at_most() -> None:
    weight = torch.randn(8, 100) * torch.logspace(-3, 3, 8)[:, None]
    weight[3] = 0.0
    codes, scale = quantise(weight, "int8")
    assert codes.dtype == torch.int8 and int(codes.abs().max()) == 127
    assert ((codes * scale[:, None] - weight).abs() <= 0.501 * scale[:, None]).all()
    assert not codes[3].any() and not QuantisedLinear(weight, None, "int8")(torch.randn(2, 100))[:, 3].any()


def test_a_row_does_not_depend_on_the_others_or_on_threads() -> None:
    linear = QuantisedLinear(torch.randn(200, 300), None, "int8")
    x = torch.randn(40, 300)
    whole, threads = linear(x), torch.get_num_threads()
    x[3, 7], x[5, 1] = torch.nan, torch.inf
    torch.set_num_threads(3)
    broken = linear(x)
    torch.set_num_threads(threads)
    assert broken[3].isnan().all() and not broken[5].isfinite().any()
    rest = [row for row in range(40) if row not in (3, 5)]
    assert torch.equal(broken[rest], whole[rest])


@pytest.mark.parametrize("rows", [9, 20])
def test_the_product_of_a_gpu_is_the_same(rows: int) -> None:
    """torch._int_mm on codes of the kernel; on a CPU both compute too."""
    pytest.importorskip("triton")
    weight, bias = torch.randn(64, 96), torch.randn(64)
    linear = QuantisedLinear(weight, bias, "int8")
    x = torch.randn(rows, 96)
    expected = linear(x)
    linear._on_cpu, linear.weight, linear._kernels = False, quantise(weight, "int8")[0], kernels
    torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("width", [1, 70, 5000])
def test_a_kernel_quantises_as_torch_does(width: int, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch, where torch took eight or nine; also values in the middle of two codes, and rows of zeros."""
    pytest.importorskip("triton")
    dtype, most = ops.quantisation.CODES[kind]
    given = {"most": most, "smallest": ops.quantisation.SMALLEST, "rows": 7}
    for x in (torch.randn(4, width), torch.arange(-127, 4 * width - 127).view(4, width) / 2, torch.zeros(4, width)):
        found, scales = kernels.quantise_rows(x, dtype, **given)
        codes, expected = quantise(x, kind)
        assert found.shape == (7, width) and torch.equal(scales, expected)
        # the interpreter rounds to fp8 its own way, worst at powers of two; tests/gpu compares what a GPU rounds
        compared = codes.float().frexp().mantissa.abs() != 0.5 if kind == "fp8" else codes == codes
        compared &= (codes.float().abs() >= 2**-6) | (kind == "int8")
        near = {"rtol": 2**-3 if kind == "fp8" else 0.0, "atol": 0.0}
        torch.testing.assert_close(found[:4].float()[compared], codes.float()[compared], **near)
    x[1, 0], x[2, 0] = torch.nan, torch.inf
    assert kernels.quantise_rows(x, dtype, **given)[1].isfinite().tolist() == [True, False, False, True]
    launched = count_launches(monkeypatch, ops.quantisation)
    with Operations() as operations:
        kernels.quantise_rows(x, dtype, **given)
    assert len(launched) == 1 and not operations.computing


@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu() -> None:
    script = """
from hybrid_rlhf.generation.ops import quantisation
def compiled(codes, ROUND):
    KINDS.update(x="*bf16", codes=codes, scales="*fp32", width="i32", most="fp32", smallest="fp32")
    return shared_bytes(quantisation._quantise_kernel, dict(ROUND=ROUND, BLOCK=4096))
"""
    assert_fits(script, 'compiled("*i8", True), compiled("*fp8e4nv", False)')


def test_fp8_codes_are_within_their_rounding() -> None:
    weight = torch.randn(16, 64)
    codes, scale = quantise(weight, "fp8")
    assert float(codes.float().abs().max()) == 448.0
    torch.testing.assert_close(codes.float() * scale[:, None], weight, rtol=2**-4, atol=1e-3)


def decoders(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> list[Decoder]:
    """Inference weights as they are, and in 8 bits."""
    world = solo_world(torch.device("cpu"))
    return [decoder_of(model, world=world, dtype=dtype, quantization=kind) for kind in (None, "int8")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["llama with biases", "gemma2", "gemma4 with experts", "gpt2", "qwen3_moe", "gpt_oss", "qwen2_moe", "llama4"],
)
def test_logprobs_are_near_those_without(name: str, dtype: torch.dtype) -> None:
    model = variant(name)
    tokens = probe_tokens(model.config.vocab_size, 24)
    whole, decoder = decoders(model, dtype)
    difference = (probe_logprobs(decoder, tokens) - probe_logprobs(whole, tokens)).abs()
    assert 0.0 < float(difference.mean()) < 0.1
    check_inference_weights(decoder, module_logprobs(model, probe_tokens(model.config.vocab_size)))


def test_head_router_and_embedding_keep_their_dtype() -> None:
    weights = decoders(variant("qwen3_moe"))[1]._weights
    layer = next(layer for layer in weights.layers if layer.experts is not None)
    assert isinstance(weights.head, InferenceLinear)
    assert weights.embed.dtype == layer.experts.router.dtype == torch.float32
    assert layer.qkv.weight.dtype == torch.int8
    assert {part.weight.dtype for part in layer.experts.products.values()} == {torch.int8}


def test_decoding_reads_a_quarter_and_computes_half() -> None:
    """Of float32; half the time of operations in 16 bits, which is what the utilisation of a GPU is relative to."""
    model = tiny_model(hidden_size=128, intermediate_size=256, vocab_size=32)
    whole, decoder = decoders(model)
    head = 32 * 128 * 4
    assert decoder.product_bytes - head == (whole.product_bytes - head) / 4
    assert decoder.token_operations - head / 2 == (whole.token_operations - head / 2) / 2


def test_from_pretrained_generates_quantised(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_model())
    settings = {"dtype": torch.float32, "quantization": "int8"}
    engine = GenerationEngine.from_pretrained(str(tmp_path), **settings)
    each = zip(SHORT_PROMPTS, per_request(SHORT_SAMPLED, len(SHORT_PROMPTS)), strict=True)
    alone = [engine.generate([prompt], [params])[0] for prompt, params in each]
    assert token_ids_of(engine.generate(SHORT_PROMPTS, SHORT_SAMPLED)) == token_ids_of(alone)


def test_what_has_no_quantised_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    build = GenerationEngine.from_model
    assert "on a CPU is int8, got fp8: give int8" in refused(build, model, quantization="fp8")
    assert "got torch.float16: set rollout.dtype" in refused(build, tiny_model().half(), quantization="int8")
    assert "got backend module: leave one out" in refused(build, model, quantization="int8", backend="module")
    bloom = variant("bloom")
    bloom.config.apply_residual_connection_post_layernorm = True
    assert "int8 needs inference weights, BloomForCausalLM has none" in refused(build, bloom, quantization="int8")
    monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    assert "got none: install g++, or leave" in refused(build, model, quantization="int8")


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "experts", "said"),
    [
        ("fp8", (8, 6), torch.bfloat16, False, "fp8 needs a GPU of compute capability 8.9, got 8.6: leave"),
        ("int8", (7, 5), torch.bfloat16, False, "int8 needs a GPU of compute capability 8.0, got 7.5: leave"),
        ("fp8", (9, 0), torch.float32, False, "fp8 needs bfloat16, got torch.float32: set rollout.dtype to bfloat16"),
        ("int8", (9, 0), torch.float32, True, "on a GPU needs a model without routed experts, got some: leave"),
    ],
)
def test_gpus_without_support_are_refused(
    kind: Any,
    capability: tuple[int, int],
    dtype: torch.dtype,
    experts: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with user_error(said):
        layers._require_support(kind, torch.device("cuda"), dtype, experts=experts)
