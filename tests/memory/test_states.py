"""What the plan takes for the KV cache and the states of recurrent layers is what a rollout takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.memory.generation import cache_plan
from hybrid_rlhf.memory.shapes import ShapedModel
from tests.support.families import variant
from tests.support.generation import random_tokens


@pytest.mark.parametrize(
    "name", ["qwen3_5", "falcon_h1", "jamba", "lfm2", "deepseek_v3", "minicpm3", "falcon 7b", "falcon 40b"]
)
def test_the_cache_and_the_states_are_as_large_as_planned(name: str, tmp_path: Path) -> None:
    rows, planned, workspace = planned_and_held(variant(name), tmp_path)
    held = [workspace.cache.keys, workspace.cache.values][: workspace.cache.layout.stores]
    if workspace.states is not None:
        held += [workspace.states.conv, workspace.states.memory]
    assert rows == 6 and planned == sum(store.nbytes for store in held)


@pytest.mark.parametrize("name", ["gemma4", "gemma4 that shares keys", "gemma4 whose keys are values"])
def test_the_cache_of_layers_that_differ_is_as_large_as_planned(name: str, tmp_path: Path) -> None:
    lm = variant(name)
    lm.config.sliding_window = 100  # the plan leaves out what windows save
    rows, planned, workspace = planned_and_held(lm, tmp_path)
    assert rows == 6 and planned == workspace.cache.keys.nbytes + workspace.cache.values.nbytes


def planned_and_held(lm: PreTrainedModel, tmp_path: Path) -> tuple[int, float, Any]:
    """Rows and bytes of the plan, and the memory of a rollout."""
    sampling = SamplingParams(max_new_tokens=10, n=2)
    lm.save_pretrained(tmp_path)
    engine = GenerationEngine.from_model(lm, stop_token_ids=(), kv_cache_gib=1.0)
    engine.generate([random_tokens(20) for _ in range(3)], sampling)
    workspace = engine.backend.workspace
    model = ShapedModel(
        str(tmp_path), "causal_lm", config=ModelConfig(path=""), dtype=torch.float32, lora=None, learns=True
    )
    rollout = RolloutConfig(prompts_per_step=3, max_prompt_tokens=20, sampling=sampling, kv_cache_gib=1.0)
    plan = cache_plan(model, rollout, ranks=1, room_bytes=2.0**30, dtype=torch.float32, device=torch.device("cpu"))
    return plan.rows, plan.cache_bytes, workspace
