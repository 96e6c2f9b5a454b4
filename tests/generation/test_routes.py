"""Recorded experts: those of the model's own routers, whatever is shared, cut or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation import Completion, GenerationEngine, SamplingParams
from hybrid_rlhf.generation.architecture.hugging_face import describe
from hybrid_rlhf.generation.architecture.model_description import Split
from hybrid_rlhf.generation.batching import capacity, rows
from hybrid_rlhf.generation.model.cache import CacheLayout, page_bytes
from tests.support.families import EXPERT_VARIANTS, variant
from tests.support.generation import PROMPTS, SAMPLED, STOP_TOKEN_IDS, engine_of, random_tokens
from tests.support.routes import module_routes
from tests.support.tiny import tiny_model

QUICK = ("deepseek_v3", "llama4", "gemma4 with experts", "minimax")
"""Beside those whose requests are preempted below."""


def recorded(model: PreTrainedModel, **settings: Any) -> GenerationEngine:
    return engine_of(model, STOP_TOKEN_IDS, **settings)


def assert_own_routes(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], results: Sequence[Sequence[Completion]]
) -> None:
    """Each completion has the experts of the model's own forward over its tokens, and none for the last."""
    for prompt, samples in zip(prompts, results, strict=True):
        for sample in samples:
            assert sample.routes is not None
            tokens = [*prompt, *sample.token_ids]
            assert len(sample.routes) == len(tokens)
            assert (sample.routes[-1] == -1).all()
            expected = module_routes(model, tokens)
            np.testing.assert_array_equal(np.sort(sample.routes[:-1]), np.sort(expected[:-1]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.faults) for name in EXPERT_VARIANTS]
)
def test_routes_are_those_of_the_models_own_routers(name: str) -> None:
    """With prefixes that prompts and samples share, and prompts in chunks."""
    model = variant(name)
    whole = recorded(model).generate(PROMPTS, SAMPLED, record_routes=True)
    chunked = recorded(model, max_batch_rows=3, prefill_tokens=5).generate(PROMPTS, SAMPLED, record_routes=True)
    assert_own_routes(model, PROMPTS, whole)
    assert_own_routes(model, PROMPTS, chunked)


@pytest.mark.parametrize(
    ("name", "spare_blocks"),
    [
        *(("qwen3_moe", 0), ("gpt_oss", 5), ("qwen3_5_moe", 5)),
        pytest.param("mixtral with windows", 0, marks=pytest.mark.faults),
    ],
)
def test_routes_of_requests_that_are_preempted(name: str, spare_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sampling = variant(name), replace(SAMPLED, max_new_tokens=40)
    prompts = [*PROMPTS, *(random_tokens(10) for _ in range(5))]
    engine = recorded(model)
    engine.generate(prompts, sampling, record_routes=True)
    cache = engine.backend.held.cache
    monkeypatch.setattr(rows.ExpectedLength, "of", lambda self, limit: 1.0)
    monkeypatch.setattr(capacity.Sequences, "least_pages", lambda self, rows: self.longest_pages)
    pages = 1 + cache.layout.pages_of(44 + 40, computed_together=7) + spare_blocks * cache.layout.tables
    size = page_bytes(cache.layout, torch.float32)
    states = 25 * engine.backend.decoder.state_bytes
    tight = recorded(model, kv_cache_gib=((pages + 0.5) * size + states) / 2**30, prefill_tokens=7)
    assert_own_routes(model, prompts, tight.generate(prompts, sampling, record_routes=True))
    assert tight.backend.preemptions > 0


def test_prefixes_of_earlier_calls_bring_their_routes() -> None:
    model, prompt = variant("qwen3_moe"), random_tokens(40)
    engine = recorded(model)
    ((first,),) = engine.generate([prompt], SamplingParams(max_new_tokens=9, seed=0), record_routes=True)
    turn = prompt + first.token_ids + random_tokens(5)
    results = engine.generate([turn], SamplingParams(max_new_tokens=4, seed=0), record_routes=True)
    assert_own_routes(model, [turn], results)
    np.testing.assert_array_equal(results[0][0].routes[: len(first.routes) - 1], first.routes[:-1])


def test_only_the_requests_that_ask_report_routes() -> None:
    engine = recorded(variant("qwen3_moe"))
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
    assert layout.routes is not None and layout.routes.dtype == dtype
    plain = CacheLayout.of(architecture, split, 64)
    assert page_bytes(layout, torch.float32) - page_bytes(plain, torch.float32) == 16 * 3 * 2 * dtype.itemsize


def test_an_engine_that_cannot_record_says_so() -> None:
    """Without experts, or through the module."""
    for engine in (recorded(tiny_model()), recorded(variant("qwen3_moe"), backend="module")):
        assert not engine.records_routes
        with pytest.raises(UserError, match="record_routes needs a mixture of experts with inference weights"):
            engine.generate([[5]], SamplingParams(max_new_tokens=2), record_routes=True)
