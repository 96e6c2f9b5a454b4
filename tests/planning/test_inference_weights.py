"""What the plan takes for inference weights is what those of real models take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops.quantisation import Quantization
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.models.families import keep_float32_logits
from hybrid_rlhf.planning.inference_memory import inference_weight_bytes
from hybrid_rlhf.planning.shapes import ShapedModel, shaped_model
from hybrid_rlhf.runtime.world import solo_world
from tests.support.families import variant
from tests.support.model_types import tiny_of_type

CPU = torch.device("cpu")


def product_bytes(decoder: Decoder) -> int:
    """Of all products as they are packed or quantised, with the scales of the latter, without biases."""
    weights = decoder._weights
    products: list[Any] = [weights.head, *([] if weights.layer_inputs is None else [weights.layer_inputs.project])]
    for layer in weights.layers:
        products += [*layer.products.values(), *(layer.experts.products.values() if layer.experts else ())]
    return sum(_stored_bytes(product) for product in products)


def _stored_bytes(product: Any) -> int:
    if vars(product).get("_by_kernel"):  # without what fills up the last tile
        return int(product.outputs * product.inputs * product.weight.element_size())
    tensors = [vars(product)[name] for name in ("weight", "scale", "_offset") if name in vars(product)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def shaped(lm: Any, folder: Path, *, lora: LoraConfig | None = None) -> ShapedModel:
    lm.save_pretrained(folder)
    return shaped_model(str(folder), "causal_lm", config=ModelConfig(), dtype=torch.float32, lora=lora, learns=True)


def planned_bytes(model: ShapedModel, rollout: RolloutConfig | None = None, **changes: Any) -> float:
    settings = {"stage": 0, "dtype": torch.float32, "device": CPU, **changes}
    return inference_weight_bytes(model, rollout or RolloutConfig(), **settings)


def decoder_for(lm: Any, **settings: Any) -> Decoder:
    decoder = decoder_of(lm, world=solo_world(CPU), dtype=torch.float32, **settings)
    assert decoder is not None
    return decoder


@pytest.mark.parametrize(
    "name",
    ["llama", "gpt2", "deepseek_v3", "qwen2_moe", "jamba", "granite 4", "minimax", "nemotron_h"]
    + ["gemma4 with experts", "gemma4 that shares keys", "gemma4 whose keys are values"],
)
def test_packed_products_take_what_was_planned(name: str, tmp_path: Path) -> None:
    """Experts, products that each rank has whole, keys that are values."""
    lm = variant(name)
    decoder = decoder_for(lm)
    planned = planned_bytes(shaped(lm, tmp_path))
    assert planned == product_bytes(decoder)


SIZES = {"hidden_size_per_layer_input": 32}
"""Of types whose own is no multiple of the 32 outputs that a kernel of quantised products computes together."""


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_oss", "qwen2_moe", "gemma4_text", "llama4_text"])
def test_quantised_products_take_a_byte_per_weight_and_their_scales(model_type: str, tmp_path: Path) -> None:
    lm = tiny_of_type(model_type, **(SIZES if model_type == "gemma4_text" else {}))
    decoder = decoder_for(lm, quantization="int8")
    model, rollout = shaped(lm, tmp_path), RolloutConfig(quantization="int8")
    planned = planned_bytes(model, rollout, stage=0)
    assert planned == product_bytes(decoder)


def test_a_language_model_beside_towers_takes_what_was_planned(tmp_path: Path) -> None:
    lm = tiny_of_type("gemma3")
    decoder = decoder_for(lm)
    rollout, model = RolloutConfig(), shaped(lm, tmp_path)
    planned = planned_bytes(model, rollout, stage=0)
    assert planned == product_bytes(decoder)
    whole = planned_bytes(model, rollout, stage=3)
    text = sum(p.numel() for p in lm.model.language_model.parameters())
    assert whole == 4 * (text + lm.lm_head.weight.numel()), "the tied head is packed besides"


def test_other_dtypes_are_copies_and_keep_logits_in_float32(tmp_path: Path) -> None:
    lm = variant("llama")  # its head is tied
    model, weights, head = shaped(lm, tmp_path), sum(p.numel() for p in lm.parameters()), lm.lm_head.weight.numel()
    planned = planned_bytes(model, dtype=torch.bfloat16)
    assert planned == 2 * weights + 4 * head
    keep_float32_logits(model.lm, False)
    assert planned_bytes(model, dtype=torch.bfloat16) == 2 * (weights + head)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_gpus_share_what_they_do_not_change(quantization: Quantization | None, tmp_path: Path) -> None:
    """Views cost nothing; codes of the products do, and their scales."""
    lm = variant("gemma4 that shares keys")
    model, rollout = shaped(lm, tmp_path), RolloutConfig(quantization=quantization)
    gpu = torch.device("cuda")
    own, whole = (planned_bytes(model, rollout, stage=stage, device=gpu) for stage in (2, 3))
    decoder = decoder_for(lm, quantization="int8")
    products = [product for layer in decoder._weights.layers for product in layer.products.values()]
    codes = sum(product.outputs * (product.inputs + 4) for product in products)
    trained = {name: p.numel() for name, p in lm.named_parameters()}
    rest = {name: size for name, size in trained.items() if "norm" in name or "embed" in name or "model_proj" in name}
    if quantization is None:
        assert (own, whole) == (0, 4 * sum(trained.values()))
    else:
        assert (own, whole) == (codes, codes + 4 * sum(rest.values()))


@pytest.mark.parametrize(("name", "roles"), [("deepseek_v3", "q_a_proj kv_a_proj_with_mqa q_b_proj"), ("llama", "")])
def test_gpus_copy_what_is_not_adjacent_or_is_reordered(name: str, roles: str, tmp_path: Path) -> None:
    """Which ZeRO 1 and 2 lay out in the order of the modules: latents of queries and keys are one product."""
    lm = variant(name)
    copied = sum(p.numel() for key, p in lm.named_parameters() if key.split(".")[-2] in roles.split())
    model, gpu = shaped(lm, tmp_path), torch.device("cuda")
    own = planned_bytes(model, stage=2, device=gpu)
    assert own == 4 * copied
