"""Recurrent layers: whatever a step mixes, the state of a row is that of its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.architecture.hugging_face import describe
from hybrid_rlhf.generation.architecture.model_description import Split
from hybrid_rlhf.generation.batching.blocks import BlockPool, BlockTable
from hybrid_rlhf.generation.batching.continuous import ContinuousBatch, LiveRow, RowStates
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.model.cache import CacheLayout, page_bytes
from hybrid_rlhf.generation.model.recurrent.states import StateCache
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.generation.weights.probe import probe_logprobs
from hybrid_rlhf.models.families import FAMILIES
from hybrid_rlhf.models.head_check import module_logprobs
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import user_error
from tests.support.families import VARIANTS, variant
from tests.support.generation import (
    PROMPTS,
    SAMPLED,
    engine_of,
    keep_in_flight,
    random_tokens,
    token_ids_of,
)
from tests.support.marks import faults

CPU = torch.device("cpu")
RECURRENT = [name for name, (family, _) in VARIANTS.items() if FAMILIES[family].recurrence is not None]

QUICK = ("qwen3_5", "jamba", "granite 4", "lfm2_moe", "minimax", "falcon_h1 with a norm after the gate")
"""One of each kind of recurrence, and one with attention beside it in a layer."""


def marked(name: str, *more: int) -> Any:
    """Parameters of a family."""
    return pytest.param(name, *more) if name in QUICK else faults(name, *more)


@pytest.mark.parametrize(("name", "flying"), [marked(name, place % 2) for place, name in enumerate(RECURRENT)])
def test_a_turn_continues_from_the_state_at_the_end_of_the_last(
    name: str, flying: int, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are in flight as on a GPU, or not; a row that has ended runs in the one that is in flight."""
    keep_in_flight(monkeypatch, flying)
    model, prompts, greedy = variant(name), [random_tokens(40), random_tokens(7)], replace(SAMPLED, n=1, temperature=0)
    engine = engine_of(model)
    for turn in range(3):
        read.clear()
        completions = [samples[0] for samples in engine.generate(prompts, greedy)]
        if turn:
            assert read[0] == 2 * (6 - flying), "the last sampled token and the five new ones of each"
        alone = engine_of(model).generate(prompts, greedy)
        for mine, (theirs,) in zip(completions, alone, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        prompts = [
            [*prompt, *one.token_ids, *random_tokens(5)] for prompt, one in zip(prompts, completions, strict=True)
        ]
    engine.backend.sync_weights(engine.backend.decoder)
    read.clear()
    engine.generate(prompts, replace(greedy, max_new_tokens=1))
    assert sum(read) >= sum(map(len, prompts)), "nothing of older weights is used"


def test_a_prompt_that_is_sampled_again_is_read_from_its_last_block(read: list[int]) -> None:
    model, prompt, params = variant("qwen3_5"), random_tokens(92), SamplingParams(max_new_tokens=3, n=8, seed=0)
    expected = engine_of(model).generate([prompt], params)
    engine = engine_of(model, max_batch_rows=6)
    for first in ([80], []):
        read.clear()
        assert token_ids_of(engine.generate([prompt], params)) == token_ids_of(expected)
        assert read == [*first, 12, 6, 6, 12, 2, 2], "two samples come late"


def test_the_state_after_a_common_beginning_is_saved_when_it_occurs_again(read: list[int]) -> None:
    model, system, greedy = variant("qwen3_5"), random_tokens(83), SamplingParams(max_new_tokens=4, temperature=0.0)
    engine = engine_of(model)
    engine.generate([random_tokens(153) for _ in range(4)], greedy)  # the cache is as large as a call needs
    counted = []
    for _ in range(3):
        prompt = system + random_tokens(70)
        read.clear()
        ((found,),) = engine.generate([prompt], greedy)
        counted.append(list(read))
        alone = engine_of(model).generate([prompt], greedy)
        assert found.token_ids == alone[0][0].token_ids
    assert [each[:-3] for each in counted] == [[144, 9], [80, 64, 9], [64, 9]], "whole blocks of 16 are common"


def test_states_after_a_token_that_was_not_kept_are_not_saved() -> None:
    """A step that was in flight has computed it, while another row ended the call."""
    pool, tokens = BlockPool(CacheLayout(width=1), 9, states=4), list(range(20))
    saved, live = (
        StateCache(architecture, architecture.recurrence, units=2, slots=4, dtype=torch.float32, device=CPU)
        for architecture in [describe(variant("qwen3_5"))[0]] * 2
    )
    for computed, expected in ((21, False), (20, True)):
        request = Request(tokens, 0, SamplingParams(), frozenset(), np.zeros(4))
        row = LiveRow(request, 0, BlockTable(pool), slot=1, computed=computed)
        row.table.extend(20)
        row.table.set_ready(0, 20, of=20)
        row.table.index(tokens)
        RowStates(live, saved, pool).save(row)
        assert (pool.match([*tokens, 1]).state is not None) == expected


def test_room_for_states_grows_with_the_rows(read: list[int]) -> None:
    model, sampling = variant("qwen3_5"), SamplingParams(max_new_tokens=2, temperature=0.0)
    engine, prompt = engine_of(model), random_tokens(30)
    ((first,),) = engine.generate([prompt], sampling)
    assert engine.backend.held.saved_states == 32
    others = [random_tokens(40) for _ in range(20)]
    read.clear()
    engine.generate([[*prompt, *first.token_ids, 5], *others], sampling)
    assert engine.backend.held.saved_states == 42 == engine.backend.held.pool._states.slots
    assert read[0] == 20 * 40 + 2, "the state that was saved is still found"


def test_pages_are_counted_where_prompts_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt ends its step early, so that the second ends in it, and its samples need pages."""
    launch, checked = ContinuousBatch._launch, []

    def launched(batch: ContinuousBatch) -> None:
        missing, before, waiting = batch._pages_missing(), batch._pool.available_pages, len(batch._waiting)
        launch(batch)
        if not waiting:
            taken = before - batch._pool.available_pages
            assert taken <= missing
            checked.append(taken)

    monkeypatch.setattr(ContinuousBatch, "_launch", launched)
    engine = engine_of(variant("qwen3_5"), prefill_tokens=100)
    sampling, system = SamplingParams(max_new_tokens=4, n=8, seed=0), random_tokens(80)
    engine.generate([random_tokens(160) for _ in range(3)], sampling)
    engine.generate([system + random_tokens(70)], sampling)
    checked.clear()
    engine.generate([system + random_tokens(80), random_tokens(56)], sampling)
    assert max(checked) >= 8


def test_a_state_without_room_for_its_last_block_is_not_used() -> None:
    """Its keys and values cannot be copied, and a shorter state is not saved."""
    pool = BlockPool(CacheLayout(width=1), 1 + 3, states=4)
    tokens, table = list(range(40)), BlockTable(pool)
    table.extend(40)
    table.set_ready(0, 40, of=40)
    table.index(tokens)
    assert pool.save_state(tokens) is not None
    match, other = pool.match([*tokens, 1]), BlockTable(pool)
    assert match.tail_tokens == 8
    assert other.begin(match) == (0, []) and other.blocks == []
    table.release()
    assert pool.available_pages == 3


def test_memory_of_states_is_planned() -> None:
    """A budget for one completion and three slots is not exceeded."""
    params = SamplingParams(max_new_tokens=10, seed=1)
    engine = engine_of(variant("qwen3_5"))
    expected = engine.generate(PROMPTS[:4], params)
    layout, states = engine.backend.held.cache.layout, engine.backend.decoder.state_bytes
    page = page_bytes(layout, torch.float32)
    budget = (1 + layout.pages_of(max(map(len, PROMPTS[:4])) + 10)) * page + 3.5 * states
    tight = engine_of(variant("qwen3_5"), kv_cache_gib=budget / 2**30)
    assert token_ids_of(tight.generate(PROMPTS[:4], params)) == token_ids_of(expected)
    live = tight.backend.workspace.states
    taken = live.conv.nbytes + live.memory.nbytes
    assert 2 <= live.slots <= 3 and taken == live.slots * states
    assert taken + tight.backend.held.cache.pages * page <= budget


def test_more_ranks_than_groups_of_heads_are_refused() -> None:
    architecture, _ = describe(variant("bamba"))
    with user_error("2 ranks are more than the 1 of this model"):
        Split.of(architecture, 0, 2)


def test_biases_of_projections_count() -> None:
    """Padding is no comparison here: in transformers' module, biases enter the states of padded tokens."""
    model = variant("granite 4", mamba_proj_bias=True, num_local_experts=0)
    tokens = random_tokens(20)
    found = probe_logprobs(decoder_of(model, world=solo_world(CPU), dtype=torch.float32), tokens)
    torch.testing.assert_close(found, module_logprobs(model, tokens), atol=1e-4, rtol=0)
