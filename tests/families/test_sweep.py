"""The sweep over model types: a part of it here, all of it in `make families`."""

from __future__ import annotations

import pytest

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
    ["idefics3", "internvl", "llama4", "llava", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen2_audio"],
)
def test_a_type_with_towers_computes_text_and_is_saved_with_them(model_type: str) -> None:
    """Towers at several places: Llama 4's are beside a causal LM with a head of its own."""
    report = check_type(model_type)
    assert (report.generation, report.training, report.lora, report.towers) == (
        "inference weights",
        "packed",
        "yes",
        "kept",
    )


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
