"""Every row of the family table against Hugging Face: log-probs and greedy tokens."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.architecture.hugging_face import NotDescribed, describe
from hybrid_rlhf.generation.architecture.model_description import Split
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.model.cache import CacheLayout, token_bytes
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops.rows import ACTIVATIONS
from hybrid_rlhf.generation.weights.inference_weights import DescribedModel, InferenceWeights
from hybrid_rlhf.generation.weights.probe import check_inference_weights, probe_logprobs
from hybrid_rlhf.models.families import FAMILIES, keep_float32_logits
from hybrid_rlhf.models.head_check import module_logprobs, probe_tokens
from hybrid_rlhf.models.pretrained.loading import position_limit
from hybrid_rlhf.runtime.world import solo_world
from tests.generation.references import hugging_face_greedy
from tests.support.errors import user_error
from tests.support.families import COMMON, GQA, MAMBA, VARIANTS, variant
from tests.support.generation import engine_of
from tests.support.marks import faults
from tests.support.tiny import VOCABULARY, tiny_model

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 200, (length,), generator=GENERATOR).tolist() for length in (5, 1, 9, 3, 20)]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
STOP = [2, 11, 40, 77, 130]
WRONG_IN_CACHE = {"nemotron_h"}
"""Whose module leaves out the least time step where it decodes with a cache."""


def decoder_from(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Decoder:
    weights = dict(model.named_parameters())
    described = DescribedModel.of(model, weights)  # raises the reason if it cannot
    planned = InferenceWeights(described, world=solo_world(CPU), dtype=dtype)
    return planned.build((name, weight, True) for name, weight in weights.items())


@pytest.mark.parametrize("name", VARIANTS)
def test_logprobs_are_those_of_the_module(name: str) -> None:
    model = variant(name)
    tokens = probe_tokens(model.config.vocab_size, 24)
    expected = module_logprobs(model, tokens)
    assert expected.std() > 0.5, "a flat distribution would prove nothing"
    torch.testing.assert_close(probe_logprobs(decoder_from(model), tokens), expected, atol=1e-4, rtol=0)


BRANCHES = (
    *("llama", "gemma2", "gemma3", "gemma4 that shares keys", "gpt_oss", "llama4", "bloom", "falcon rw", "gpt2"),
    *("olmo2", "cohere", "deepseek_v3", "qwen3_5", "granite 4", "jamba", "lfm2", "minimax"),
)
"""Families that have all branches of a decoder in torch."""


@pytest.mark.parametrize(
    "name",
    [*BRANCHES, *(faults(name) for name in VARIANTS if name not in BRANCHES)],
)
def test_torch_computes_what_the_compiled_kernels_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no compiler."""
    model = variant(name)
    tokens = probe_tokens(model.config.vocab_size)
    expected = probe_logprobs(decoder_from(model), tokens)
    monkeypatch.setattr(choice, "kernels_for", lambda device, dtype: None)
    torch.testing.assert_close(probe_logprobs(decoder_from(model), tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_are_those_of_hugging_face(name: str) -> None:
    model = variant(name)
    engine = engine_of(model, STOP)
    completions = [samples[0] for samples in engine.generate(PROMPTS, GREEDY)]
    model.generation_config.use_cache = name not in WRONG_IN_CACHE
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.token_ids == hugging_face_greedy(model, prompt, 12, stop=STOP)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] in STOP else "length")


def test_every_row_of_the_table_has_a_variant() -> None:
    assert {family for family, _ in VARIANTS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma2", "gemma4 with experts", "opt", "falcon 40b", "llama4", "qwen3_5", "falcon_h1", "jamba", "lfm2"],
)
def test_bfloat16_stays_near_the_module(name: str) -> None:
    model = variant(name).to(torch.bfloat16)
    tokens = probe_tokens(model.config.vocab_size)
    found, expected = probe_logprobs(decoder_from(model, torch.bfloat16), tokens), module_logprobs(model, tokens)
    assert (found - expected).abs().mean() < 0.05
    exact = module_logprobs(model.float(), tokens)
    assert (found - exact).abs().mean() < 1.5 * (expected - exact).abs().mean() + 0.01, "no further from the truth"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@torch.no_grad()
def test_logits_of_bfloat16_inference_weights_stay_in_float32(name: str, packed: bool) -> None:
    model = variant(name).to(torch.bfloat16)
    hidden = torch.randn(5, model.config.hidden_size).bfloat16()
    for wanted in (True, False):
        keep_float32_logits(model, wanted)
        with torch.backends.mkldnn.flags(enabled=packed):
            decoder = decoder_from(model, torch.bfloat16)
            found = decoder.logits(hidden)
        x = decoder._weights.final_norm(hidden)
        if decoder._weights.embed_out is not None:
            x = torch.nn.functional.linear(x, decoder._weights.embed_out)
        head = model.get_output_embeddings()
        assert head.bias is None
        exact = torch.log_softmax(x.float() @ head.weight.float().t(), dim=-1)
        error = float((torch.log_softmax(found, dim=-1) - exact).abs().max())
        assert found.dtype is torch.float32
        assert error < 1e-5 if wanted else error > 1e-4


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("olmo", {}, "no row for model type olmo"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "of type dynamic"),
        ("llama", {"hidden_act": "tanh"}, "no activation tanh"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "residuals after the norm"),
        ("gpt2", {"add_cross_attention": True}, "cross attention"),
        ("bamba", {**MAMBA, "time_step_limit": (0.01, 1.0)}, "limited time steps"),
        ("granitemoehybrid", {**COMMON, **GQA, **MAMBA}, "no layer with attention"),
        (
            "falcon_h1",
            {**COMMON, **GQA, **MAMBA, "mamba_d_ssm": 64, "attention_bias": True, "attention_in_multiplier": 2.0},
            "biases after multiplied inputs",
        ),
    ],
)
def test_what_is_not_described_runs_through_the_module_and_says_why(
    family: str, settings: dict[str, object], reason: str, log_lines: list[str]
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **settings})).eval()
    with pytest.raises(NotDescribed, match=reason):
        describe(model)
        decoder_from(model)
    (completion,) = engine_of(model).generate([[4, 5, 6]], GREEDY)[0]
    assert len(completion.token_ids) == 12
    (line,) = [line for line in log_lines if "runs through its Hugging Face module" in line]
    assert reason in line


@pytest.mark.parametrize("name", ["phi3 longrope", "phimoe longrope"])
def test_positions_end_where_longrope_takes_other_factors(name: str) -> None:
    """Also when the model's table is that of a longer sequence, which its last forward had."""
    model = variant(name)
    tokens = probe_tokens(model.config.vocab_size)
    expected = module_logprobs(model, tokens)
    model(input_ids=torch.ones(1, 65, dtype=torch.long))
    torch.testing.assert_close(probe_logprobs(decoder_from(model), tokens), expected, atol=1e-4, rtol=0)
    engine = engine_of(model)
    assert isinstance(engine.backend, NativeBackend)
    assert engine.max_positions == 64 == position_limit(model)
    assert len(engine.generate([[5] * 60], GREEDY)[0][0].token_ids) == 4
    with user_error(r"the model has 64 positions \(original_max_position_embeddings; .*prompt 0 has 64"):
        engine.generate([[5] * 64], GREEDY)


def test_inference_weights_that_compute_something_else_stop_the_run() -> None:
    model = variant("llama")
    decoder = decoder_from(model)
    expected = module_logprobs(model, probe_tokens(model.config.vocab_size))
    check_inference_weights(decoder, expected)
    decoder._inv_freq[0] *= 1.05
    with user_error("must agree with the training forward to 0.002 nats"):
        check_inference_weights(decoder, expected)
    with user_error("differ by nan"):
        check_inference_weights(decoder, expected * torch.nan)


def test_weights_are_views_where_they_can_be() -> None:
    """Without packing: on a GPU, or with oneDNN switched off."""
    model = tiny_model()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():  # as ZeRO 1 and 2 lay their weights out
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    with torch.backends.mkldnn.flags(enabled=False):
        weights = decoder_from(model)._weights
    for product in (layer_product for layer in weights.layers for layer_product in (layer.qkv, layer.o, layer.up)):
        assert product.weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "name", ["qwen2_moe", "glm4_moe", "granitemoe", "phimoe", "gpt_oss", "llama4", "gemma4 with experts"]
)
def test_experts_in_grouped_products_compute_as_one_by_one(name: str) -> None:
    """The way of a GPU, here without packed weights."""
    model, tokens = variant(name), probe_tokens(VOCABULARY)
    with torch.backends.mkldnn.flags(enabled=False):
        decoder = decoder_from(model)
        found = probe_logprobs(decoder, tokens)
    assert any(layer.experts is not None and len(layer.experts.up) for layer in decoder._weights.layers)
    torch.testing.assert_close(found, module_logprobs(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("packed", [True, False])
def test_clamped_gates_of_experts_compute_as_the_module(packed: bool) -> None:
    """gpt-oss, whose experts have biases too; one by one, and in grouped products."""
    model, tokens = variant("gpt_oss", swiglu_limit=0.5), probe_tokens(VOCABULARY)
    with torch.backends.mkldnn.flags(enabled=packed):
        found = probe_logprobs(decoder_from(model), tokens)
    torch.testing.assert_close(found, module_logprobs(model, tokens), atol=1e-4, rtol=0)
    assert (found - module_logprobs(variant("gpt_oss", swiglu_limit=100.0), tokens)).abs().max() > 0.1, "the clamp acts"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_kind_of_attention_is_split_by_its_own_kv_heads(size: int) -> None:
    architecture, _ = describe(variant("gemma4 whose keys are values"))  # 8 KV heads of 8 dimensions, 2 of 16
    splits = [Split.of(architecture, rank, size) for rank in range(size)]
    full, sliding = ([head for split in splits for head in split.kv_heads_of[kind]] for kind in (0, 1))
    assert sliding == list(range(8)) and full == [head for head in (0, 1) for _ in range(max(1, size // 2))]
    if size == 8:  # heads of full attention are the wider ones here
        assert CacheLayout.of(architecture, splits[0], 100).width == 16


def test_ranks_must_have_the_same_heads_in_all_layers() -> None:
    architecture, _ = describe(variant("gemma4 whose keys are values"))
    kinds = (replace(architecture.kinds[0], kv_heads=4), *architecture.kinds[1:])
    with user_error("3 ranks do not with 4 and 8 KV heads: use a divisor of 4"):
        Split.of(replace(architecture, kinds=kinds), 0, 3)


def test_narrow_layers_share_places_in_the_cache() -> None:
    """Six layers whose keys have half the size of the others take the memory of three."""
    architecture, _ = describe(variant("gemma4 whose keys are values"))
    wide, narrow = architecture.layer_kinds.index(1), architecture.layer_kinds.index(0)
    kinds = [architecture.layer_kinds[layer] for layer in [wide] * 9 + [narrow] * 6]
    architecture = replace(architecture, layer_kinds=tuple(kinds))
    split = Split.of(architecture, 0, 1)
    layout = CacheLayout.of(architecture, split, 10_000)
    assert (layout.pages, layout.places_per_page, layout.width) == ((1, 3), 3, 64)
    each = layout.places_per_page * layout.width * sum(layout.pages)
    assert 2 * 4 * each == sum(
        token_bytes(architecture, split, torch.float32, layer=i) for i in architecture.cached_layers
    )
    taken = {(own.table, own.place, own.start) for own in layout.places if own is not None}
    assert len(taken) == 15 and {start for *_, start in taken} == {0, 32}


def test_layers_that_reuse_keys_have_no_place_of_their_own_in_the_cache() -> None:
    architecture, _ = describe(variant("gemma4 that shares keys"))  # sliding and full in turn, three of six share
    layout = CacheLayout.of(architecture, Split.of(architecture, 0, 1), 100)
    assert architecture.kv_sources == {3: 1, 4: 2, 5: 1} and len(architecture.cached_layers) == 3
    assert [layout.places[layer] for layer in (3, 4, 5)] == [layout.places[source] for source in (1, 2, 1)]
    assert layout.tables * layout.places_per_page == 3


def loud(name: str, magnitude: float, dtype: torch.dtype) -> PreTrainedModel:
    """A variant whose largest logits are of a magnitude."""
    model = copy.deepcopy(variant(name))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    ids = torch.tensor([probe_tokens(model.config.vocab_size)])
    with torch.no_grad():
        model.lm_head.weight *= magnitude / model(ids).logits.abs().amax(dim=-1).mean()
    return model.to(dtype)


@pytest.mark.parametrize(
    ("name", "magnitude", "dtype"),
    [
        *(("llama", 5, torch.bfloat16), ("qwen3", 20, torch.float16), ("mistral", 40, torch.bfloat16)),
        ("llama", 40, torch.float16),
    ],
)
def test_large_logits_of_low_precision_are_no_fault_and_wrong_inference_weights_are_one(
    name: str, magnitude: float, dtype: torch.dtype
) -> None:
    model = loud(name, magnitude, dtype)
    expected = module_logprobs(model, probe_tokens(model.config.vocab_size))
    check_inference_weights(decoder_from(model, dtype), expected)
    for fault in ({"activation": "relu"}, {"kinds": tuple(replace(k, rotary=None) for k in describe(model)[0].kinds)}):
        wrong = decoder_from(model, dtype)
        wrong.architecture = replace(wrong.architecture, **fault)
        wrong._activation = ACTIVATIONS[wrong.architecture.activation]
        with user_error("must agree with the training forward"):
            check_inference_weights(wrong, expected)


def test_a_row_with_a_mistake_says_so() -> None:
    row = FAMILIES["llama"]
    with pytest.raises(ValueError, match="roles .*, got atention_norm"):
        replace(row, names={**row.names, "atention_norm": "model.layers.{}.input_layernorm"})
    described = describe(tiny_model())[0]
    with pytest.raises(ValueError, match="parallel, post_norm, normed, single, got paralel"):
        replace(described, block="paralel")
