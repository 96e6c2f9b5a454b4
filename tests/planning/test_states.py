"""What the plan takes for the KV cache and the states of recurrent layers is what a rollout takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.batching.capacity import WorkingMemory
from hybrid_rlhf.planning.generation_memory import GenerationMemory, replayed_bytes, rollout_bytes, route_size
from hybrid_rlhf.planning.job import LEARNED_BYTES
from hybrid_rlhf.planning.shapes import ShapedModel, shaped_model
from hybrid_rlhf.rl.types import RolloutRoutes
from tests.support.families import variant
from tests.support.generation import random_tokens

SAMPLING = SamplingParams(max_new_tokens=10, n=2)
ROLLOUT = RolloutConfig(prompts_per_step=3, max_prompt_tokens=20, sampling=SAMPLING, kv_cache_gib=1.0)


@pytest.mark.parametrize(
    "name",
    ["qwen3_5", "falcon_h1", "jamba", "lfm2", "deepseek_v3", "minicpm3", "falcon 7b", "falcon 40b"]
    + ["gemma4", "gemma4 that shares keys", "gemma4 whose keys are values"],
)
def test_the_cache_and_the_states_are_as_large_as_planned(name: str, tmp_path: Path) -> None:
    lm = variant(name)
    if name.startswith("gemma4"):
        lm.config.sliding_window = 100  # the plan leaves out what windows save
    rows, planned, backend = planned_and_held(lm, tmp_path)
    cache = backend.held.cache
    held = [cache.keys, cache.values][: cache.layout.stores] + states_of(backend)
    assert rows == 6 and planned == sum(store.nbytes for store in held)


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "gemma4 with experts", "jamba", "granite 4"])
def test_recorded_experts_take_what_was_planned(name: str, tmp_path: Path) -> None:
    """In the cache, and in the rollout of each rank."""
    lm = variant(name)
    lm.config.sliding_window = 100
    rows, planned, backend = planned_and_held(lm, tmp_path, records_routes=True)
    cache = backend.held.cache
    held = [cache.keys, cache.values, cache.routes, *states_of(backend)]
    assert rows == 6 and planned == sum(store.nbytes for store in held)
    results = GenerationEngine.from_model(lm, stop_token_ids=()).generate(
        [random_tokens(20) for _ in range(3)], SAMPLING, record_routes=True
    )
    routes = RolloutRoutes.of([sample.routes for samples in results for sample in samples])
    assert routes is not None
    rollout = replace(ROLLOUT, routing_replay=True)
    model = shaped(tmp_path)
    of_token = routes.experts[0].nbytes
    assert (replayed_bytes(model, rollout), replayed_bytes(model, ROLLOUT)) == (of_token, 0)
    tokens = LEARNED_BYTES * 3 * 2 * 30
    alone = rollout_bytes(model, rollout, groups=1, ranks=1)
    assert alone == tokens + routes.experts.nbytes
    many = replace(rollout, prompts_per_step=500)
    assert rollout_bytes(model, many, groups=1, ranks=1) == 500 / 3 * alone
    assert rollout_bytes(model, many, groups=2, ranks=4) == 500 / 3 * alone * (1 / 2 + 1 / 4)
    assert rollout_bytes(model, many, groups=None, ranks=4) == 500 / 3 * alone / 4, "a rank that does not sample"
    compared = rollout_bytes(model, replace(ROLLOUT, prompts_per_step=500), groups=1, ranks=1)
    assert compared == 500 / 3 * tokens + 16 * 30 * of_token, "experts of 16 completions"


@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "auto"), ("granite 4 without experts or positions", "auto"), ("qwen3_moe", "module")],
)
def test_models_without_experts_and_modules_record_none(name: str, backend: Any, tmp_path: Path) -> None:
    variant(name).save_pretrained(tmp_path)
    assert route_size(shaped(tmp_path), replace(ROLLOUT, backend=backend)) is None


def test_the_plan_of_a_gpu_has_tables_split_attention_and_a_reserve_for_graphs(tmp_path: Path) -> None:
    """With 4,096 rows of 32k tokens the uniform numbers alone take 1 GiB."""
    variant("llama").save_pretrained(tmp_path)
    sampling = replace(SAMPLING, max_new_tokens=32_000)

    def planned(rows: int, **changes: Any) -> WorkingMemory:
        rollout = replace(ROLLOUT, sampling=sampling, **changes)
        gpu = torch.device("cuda", 0)
        return GenerationMemory(shaped(tmp_path), rollout, torch.bfloat16, gpu).working(rows)

    many, few = planned(4096), planned(4)
    assert 8 * 32_000 < many.table < 8 * 34_000 and many.cuda_graphs and many.reserve > 0
    heads, width, splits = 4, 8, 32
    assert few.row - many.row == heads * splits * (width + 2) * 4, "rows that fill the GPU are not split"
    assert many.of_rows(4096) > 2 * 4096 * many.table, "a capture copies the tables"
    without = planned(4096, cuda_graphs=False, prefill_tokens=512)
    assert not without.cuda_graphs and without.reserve == 0 and without.prefill < many.prefill / 2


def shaped(folder: Path) -> ShapedModel:
    config = ModelConfig(path="")
    return shaped_model(str(folder), "causal_lm", config=config, dtype=torch.float32, lora=None, learns=True)


def states_of(backend: Any) -> list[torch.Tensor]:
    """Of live rows, and the saved ones."""
    both = [states for states in (backend.workspace.states, backend.held.states) if states is not None]
    return [store for states in both for store in (states.conv, states.memory)]


def planned_and_held(lm: PreTrainedModel, tmp_path: Path, *, records_routes: bool = False) -> tuple[int, float, Any]:
    """Rows and bytes of the plan, and the backend after a rollout."""
    lm.save_pretrained(tmp_path)
    engine = GenerationEngine.from_model(lm, stop_token_ids=(), kv_cache_gib=1.0)
    engine.generate([random_tokens(20) for _ in range(3)], SAMPLING, record_routes=records_routes)
    memory = GenerationMemory(shaped(tmp_path), ROLLOUT, torch.float32, torch.device("cpu"))
    plan = memory.cache(ranks=1, room_bytes=2.0**30, records_routes=records_routes)
    return plan.rows, plan.cache_bytes, engine.backend
