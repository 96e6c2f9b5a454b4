"""Recorded experts: those of the model's own routers, whatever is shared, cut or computed again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.architecture.hugging_face import describe
from hybrid_rlhf.generation.architecture.model_description import Split
from hybrid_rlhf.generation.model.cache import CacheLayout, page_bytes
from tests.support.errors import user_error
from tests.support.families import EXPERT_VARIANTS, variant
from tests.support.generation import PROMPTS, SAMPLED, STOP_TOKEN_IDS, engine_of
from tests.support.marks import faults
from tests.support.routes import assert_own_routes

QUICK = ("deepseek_v3", "llama4", "gemma4 with experts", "minimax")
"""Beside those whose requests are preempted in test_continuous.py."""


@pytest.mark.parametrize("name", [name if name in QUICK else faults(name) for name in EXPERT_VARIANTS])
def test_routes_are_those_of_the_models_own_routers(name: str) -> None:
    """With prefixes that prompts and samples share, and prompts in chunks."""
    model = variant(name)
    whole = engine_of(model, STOP_TOKEN_IDS).generate(PROMPTS, SAMPLED, record_routes=True)
    chunked = engine_of(model, STOP_TOKEN_IDS, max_batch_rows=3, prefill_tokens=5).generate(
        PROMPTS, SAMPLED, record_routes=True
    )
    assert_own_routes(model, PROMPTS, whole)
    assert_own_routes(model, PROMPTS, chunked)


def test_only_the_requests_that_ask_report_routes() -> None:
    engine = engine_of(variant("qwen3_moe"), STOP_TOKEN_IDS)
    params = SamplingParams(max_new_tokens=3, n=2, seed=0)
    engine.generate([[5, 6]], params)
    assert engine.backend.held.cache.routes is None, "who records nothing pays nothing"
    results = engine.generate([[5, 6], [7]], params, record_routes=[False, True])
    assert [[sample.routes is not None for sample in samples] for samples in results] == [[False] * 2, [True] * 2]
    cache = engine.backend.held.cache
    assert engine.generate([[5, 6]], params)[0][0].routes is None
    assert engine.backend.held.cache is cache, "it serves a call that records nothing"


@pytest.mark.parametrize(("count", "dtype"), [(128, torch.int8), (129, torch.int16)])
def test_routes_take_a_byte_where_the_index_fits(count: int, dtype: torch.dtype) -> None:
    architecture = describe(variant("qwen3_moe"))[0]
    split = Split.of(architecture, 0, 1)
    layout = CacheLayout.of(
        replace(architecture, experts=replace(architecture.experts, count=count)), split, 64, records_routes=True
    )
    assert layout.routes.dtype == dtype
    plain = CacheLayout.of(architecture, split, 64)
    assert page_bytes(layout, torch.float32) - page_bytes(plain, torch.float32) == 16 * 3 * 2 * dtype.itemsize


def test_an_engine_that_cannot_record_says_so() -> None:
    """Without experts, or through the module."""
    for engine in (engine_of(), engine_of(variant("qwen3_moe"), backend="module")):
        assert not engine.records_routes
        with user_error("record_routes needs a mixture of experts with inference weights"):
            engine.generate([[5]], SamplingParams(max_new_tokens=2), record_routes=True)
