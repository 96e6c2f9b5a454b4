"""Launches of a decoding step on a GPU in each layer, of every family: kernels of Triton and operations of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.architecture.hugging_face import describe
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.runtime.world import default_device
from tests.support.families import VARIANTS, variant
from tests.support.generation import PROMPTS, SAMPLED
from tests.support.triton_kernels import Operations, count_launches, layer_kernels

pytest.importorskip("triton")

MOST = 12
LAYER_LAUNCHES = {
    **{"llama": 10, "llama with biases": 10, "mistral": 10, "qwen3": 11, "phi3": 10, "glm4": 10, "granite": 10},
    **{"gemma2": 10, "gemma3": 11, "gemma4": 11, "olmo2": 11, "gpt2": 9, "bloom": 10, "cohere": 10, "nemotron": 10},
    **{"mixtral": 10, "gpt_oss": 10, "qwen2_moe": 10, "qwen3_moe": 11, "olmoe": 11, "glm4_moe": 11, "llama4": 12},
    **{"deepseek_v2": 12, "deepseek_v3": 12, "minicpm3": 12, "granitemoeshared": 10, "phimoe": 11},
    **{"qwen3_5": 12, "qwen3_5_moe": 12, "granite 4": 11, "bamba": 10, "jamba": 12, "lfm2": 11, "minimax": 12},
    # more than in others: attention and a mixer side by side, an MLP beside the experts, shared experts with biases
    "falcon_h1": 16,
    "falcon_h1 with a norm after the gate": 16,
    "falcon_h1 with a norm before the gate": 16,
    "gemma4 with experts": 19,
    "ernie4_5_moe": 13,
}
"""Of the layer with the most; other families are only known to take at most 12."""


@pytest.mark.parametrize("name", VARIANTS)
def test_a_decoding_step_takes_few_launches_in_each_layer(
    name: str, everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where conversions count too, with rows so long that they are split among programs."""
    monkeypatch.setattr(choice, "can_pack", lambda device, dtype: False)  # packed weights would come before kernels
    model = variant(name).to(default_device(), torch.bfloat16)
    engine = GenerationEngine.from_model(model, stop_token_ids=range(model.config.vocab_size))
    launched = count_launches(monkeypatch, *layer_kernels())
    engine.generate(PROMPTS[:2], replace(SAMPLED, max_new_tokens=600, n=1))
    backend: Any = engine.backend
    operations, layers = Operations(), list[int]()

    def counted(block: Any) -> Any:
        def run(*given: Any) -> Tensor:
            before = len(launched) + operations.computing
            found: Tensor = block(*given)
            layers.append(len(launched) + operations.computing - before)
            return found

        return run

    block = f"_{describe(model)[0].block}"
    monkeypatch.setattr(Decoder, block, counted(getattr(Decoder, block)))
    with torch.inference_mode(), operations:
        backend.workspace.step(2)
    assert len(layers) == model.config.get_text_config().num_hidden_layers
    most = LAYER_LAUNCHES.get(name)
    assert max(layers) <= MOST if most is None else max(layers) == most
