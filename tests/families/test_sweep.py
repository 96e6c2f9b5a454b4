"""The sweep over model types: a part of it here, all of it in `make families`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hybrid_rlhf.models.families.vision import VISION_FAMILIES, images_refused
from tests.families.sweep import PAGE, check_type, page
from tests.support.model_types import model_types

IN_USE = {
    "llama": ("inference weights", "packed"),
    "gpt2": ("inference weights", "packed"),
    "bloom": ("inference weights", "padded"),
    "qwen3_moe": ("inference weights", "packed"),
    "gpt_oss": ("inference weights", "packed"),
    "llama4_text": ("inference weights", "packed"),
    "gemma4_text": ("inference weights", "packed"),
    "gemma4": ("inference weights", "packed"),
    "deepseek_v3": ("inference weights", "packed"),
    "qwen3_5_text": ("inference weights", "packed"),
    "falcon_h1": ("inference weights", "packed"),
    "jamba": ("inference weights", "packed"),
    "mamba": ("module, prompts of one length", "padded"),
    "minimax": ("inference weights", "packed"),
    "deepseek_v32": ("module, without cache", "padded"),
    "rwkv": ("module, without cache", "padded"),
}
"""How each generates and trains."""
REFUSED = {
    "bert": "log-probs of padded rows must agree with the logits of BertLMHeadModel",
    "cpmant": "log-probs of padded rows must agree with the logits of CpmAntForCausalLM",
}


@pytest.mark.parametrize("model_type", IN_USE)
def test_a_type_trains_and_generates_as_its_module_computes(model_type: str) -> None:
    report = check_type(model_type)
    assert report.is_correct, report
    assert (report.generation, report.training) == IN_USE[model_type]
    assert report.lora == "yes"


@pytest.mark.parametrize(
    "model_type",
    ["idefics3", "internvl", "llama4", "llava", "mistral3", "qwen2_vl", "qwen3_5", "qwen3_vl", "qwen2_audio"],
)
def test_a_type_with_towers_is_saved_with_them(model_type: str) -> None:
    """Towers at several places: Llama 4's are beside a causal LM with a head of its own."""
    report = check_type(model_type)
    assert (report.generation, report.training, report.lora, report.towers) == (
        "inference weights",
        "packed",
        "yes",
        "kept",
    )
    images = {"llama4": "not tested", "mistral3": "not tested", "qwen2_audio": "-"}
    assert report.images == images.get(model_type, "yes")


def _names_in(settings: Mapping[str, Any]) -> set[str]:
    nested = (_names_in(value) for value in settings.values() if isinstance(value, Mapping))
    return set(settings).union(*nested)


SIGNS = {
    "cross attention": {"cross_attention_layers", "cross_layer_interval", "resampler_heads"},
    "encoder-decoder": {"is_encoder_decoder"},
    "image vocabulary": {"vq_config"},
    "per-layer inputs": {"hidden_size_per_layer_input"},
    "query tokens": {"num_query_tokens", "latent_query_num"},
}
"""Settings of configs with which images cannot pass a tower alone."""


@pytest.mark.parametrize("model_type", sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *VISION_FAMILIES}))
def test_images_of_other_types_are_refused_with_a_reason(model_type: str) -> None:
    """Of all types that transformers gives images, the reason is what their own config shows."""
    config = CONFIG_MAPPING[model_type]()
    refusal = images_refused(config)
    settings = config.to_dict()
    names = {name for name in _names_in(settings) if name != "is_encoder_decoder" or config.is_encoder_decoder}
    expected = [reason for reason, signs in SIGNS.items() if signs & names]
    if model_type in VISION_FAMILIES:
        assert refusal is None and not expected
    elif model_type in ("mistral4", "pi0"):  # models of text, and of a robot's actions
        assert refusal and refusal.startswith(f"images need a vision-language model, got {model_type}: choose a type")
    else:
        assert refusal and "\n" not in refusal
        assert refusal.startswith(f"images of model type {model_type} are not supported (")
        assert (expected or ["not tested"])[0] in refusal


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_that_trains_wrongly_is_refused(model_type: str) -> None:
    report = check_type(model_type)
    assert report.is_correct and REFUSED[model_type] in report.training


def test_the_page_names_the_types_whose_generate_computes_something_else() -> None:
    reports = [check_type(model_type) for model_type in ("roberta", "llama")]
    assert [report.as_generate for report in reports] == [False, True]
    assert "over whole sequences:\n`roberta`.\n" in page(reports)
    assert "`roberta`" in PAGE.read_text().split("over whole sequences:")[1].split(".")[0]


def test_adapters_on_weights_that_layers_share_are_refused() -> None:
    assert "lora needs a weight of its own for each adapter" in check_type("zamba2").lora


def test_the_page_has_every_type() -> None:
    """`make families` writes it."""
    text = PAGE.read_text()
    assert [name for name in model_types() if f"`{name}`" not in text] == []
