"""Recurrent layers: whatever a step mixes, the state of a row is that of its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.architecture.hugging_face import describe
from hybrid_rlhf.generation.architecture.model_description import Split
from hybrid_rlhf.generation.batching.blocks import BlockPool, BlockTable
from hybrid_rlhf.generation.batching.continuous import ContinuousBatch, LiveRow, RowStates
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.model.attention import Chunks, DecodeRows
from hybrid_rlhf.generation.model.cache import CacheLayout
from hybrid_rlhf.generation.model.recurrent.states import BLOCK, StateCache
from hybrid_rlhf.generation.ops.recurrence import DECAYING_SCAN
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.generation.weights.probe import probe_hidden, probe_logprobs
from hybrid_rlhf.models.families import FAMILIES
from hybrid_rlhf.models.head_check import module_logprobs
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import user_error
from tests.support.families import VARIANTS, variant
from tests.support.generation import (
    PROMPTS,
    SAMPLED,
    STOP_TOKEN_IDS,
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


@pytest.mark.parametrize("name", [marked(name) for name in RECURRENT])
def test_states_go_on_from_chunk_to_chunk_and_with_their_rows(name: str) -> None:
    """In steps that mix both, with rows that move when others finish, and a prompt whose samples enter one by one."""
    model = variant(name)
    whole = engine_of(model, STOP_TOKEN_IDS).generate(PROMPTS, SAMPLED)
    module = engine_of(model, STOP_TOKEN_IDS, backend="module")
    assert token_ids_of(whole) == token_ids_of(module.generate(PROMPTS, SAMPLED))
    for rows, chunk in ((3, 5), (14, 23)):
        small = engine_of(model, STOP_TOKEN_IDS, max_batch_rows=rows, prefill_tokens=chunk)
        assert token_ids_of(small.generate(PROMPTS, SAMPLED)) == token_ids_of(whole)
        assert small.backend.workspace.slots.tolist() == [0] * rows


@pytest.mark.parametrize("name", ["qwen3_5", "granite 4"])
def test_prompts_of_many_blocks_are_computed_as_by_the_module(name: str) -> None:
    model, tokens = variant(name), random_tokens(5 * BLOCK + 7)
    decoder = decoder_of(model, world=solo_world(CPU), dtype=torch.float32)
    torch.testing.assert_close(probe_logprobs(decoder, tokens), module_logprobs(model, tokens), atol=2e-4, rtol=0)
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[:-1]
    for mine, theirs in zip(probe_hidden(decoder, tokens), expected, strict=False):
        torch.testing.assert_close(mine, theirs[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("delta", [True, False])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(0, 3), lengths=st.lists(st.integers(1, 150), max_size=4))
def test_blocks_compute_what_single_steps_do(delta: bool, seed: int, rows: int, lengths: list[int]) -> None:
    """Rows and chunks in one step, each in a slot of its own; the other slots stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    cache, count = small_cache(1 + rows + len(lengths)), rows + len(lengths)
    if not count:
        return
    for store in (cache.conv, cache.memory):
        store.copy_(torch.randn(store.shape, generator=generator))
    slots = torch.randperm(count, generator=generator) + 1
    starts = torch.randint(0, 2, (len(lengths),), generator=generator).tolist()
    total = rows + sum(lengths)
    q, k = torch.randn(2, total, 2, 5, generator=generator)
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(total, 2, 3, 4, generator=generator)
    g, beta = -torch.rand(total, 2, 3, generator=generator), torch.rand(total, 2, 3, generator=generator)
    x, weight = torch.randn(total, 7, generator=generator), torch.randn(7, 1, 4, generator=generator)
    inputs = (q, k, v, g, beta) if delta else (q, k, v, g)
    expected, out, mixed = StateCacheCopy(cache), list[torch.Tensor](), list[torch.Tensor]()
    place = 0
    for index, (slot, length) in enumerate(zip(slots.tolist(), [1] * rows + lengths, strict=True)):
        if index >= rows and not starts[index - rows]:
            expected.memory[slot], expected.conv[slot] = 0, 0
        for token in range(place, place + length):
            out.append(expected.step(slot, *(part[token] for part in inputs)))
            mixed.append(expected.convolve(slot, x[token], weight))
        place += length
    step = cache.step(
        DecodeRows(torch.empty(0), torch.zeros(rows), 1, slots[:rows]) if rows else None,
        Chunks(torch.empty(0), starts, lengths, slots[rows:]) if lengths else None,
    )
    torch.testing.assert_close(step.scan(0, DECAYING_SCAN, *inputs), torch.stack(out), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(step.convolve(0, x, weight, None), torch.stack(mixed), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.memory[0], expected.memory, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache.conv[0], expected.conv, atol=1e-5, rtol=1e-5)


class SmallKind:
    """Sizes that are all different."""

    def state_shapes(self, units: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (3, 7), (units, 5, 3, 4)


def small_cache(slots: int) -> StateCache:
    architecture = replace(describe(variant("qwen3_5"))[0], recurrent_layers=frozenset([0]))
    return StateCache(architecture, SmallKind(), units=2, slots=slots, dtype=torch.float32, device=CPU)


class StateCacheCopy:
    """The definition, one token at a time."""

    def __init__(self, cache: StateCache) -> None:
        self.memory, self.conv = cache.memory[0].clone(), cache.conv[0].clone()

    def step(self, slot: int, q, k, v, g, beta=None) -> torch.Tensor:
        """The recurrence of each head."""
        out = torch.empty_like(v)
        for group in range(v.shape[0]):
            for head in range(v.shape[1]):
                state = self.memory[slot, group, :, head] * g[group, head].exp()
                value = v[group, head]
                if beta is not None:
                    value = beta[group, head] * (value - k[group] @ state)
                state = state + torch.outer(k[group], value)
                self.memory[slot, group, :, head] = state
                out[group, head] = q[group] @ state
        return out

    def convolve(self, slot: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The convolution of each channel."""
        window = torch.cat([self.conv[slot], x[None]])
        self.conv[slot] = window[1:]
        return (window * weight[:, 0].t()).sum(dim=0)


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
            torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)
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
    launch, checked = ContinuousBatch._launch, list[int]()

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
    assert match.tail_tokens == 8 and match.state is not None
    assert other.begin(match) == (0, []) and other.blocks == []
    table.release()
    assert pool.available_pages == 3


def test_memory_of_states_is_planned() -> None:
    """A budget for one completion and three slots is not exceeded."""
    engine = engine_of(variant("qwen3_5"))
    params = SamplingParams(max_new_tokens=10, seed=1)
    engine.generate(PROMPTS[:4], params)
    backend = engine.backend
    states = sum(
        store.nbytes // store.shape[1] for store in (backend.workspace.states.conv, backend.workspace.states.memory)
    )
    assert backend.decoder.state_bytes == states > 0
    page = 2 * backend.held.cache.keys[:, 0].nbytes
    longest = 1 + backend.held.cache.layout.pages_of(max(map(len, PROMPTS[:4])) + 10)
    budget = longest * page + 3.5 * states
    tight = engine_of(variant("qwen3_5"), kv_cache_gib=budget / 2**30)
    assert token_ids_of(tight.generate(PROMPTS[:4], params)) == token_ids_of(engine.generate(PROMPTS[:4], params))
    slots, pages = tight.backend.workspace.states.memory.shape[1], tight.backend.held.cache.pages
    assert 2 <= slots <= 3 and slots * states + pages * page <= budget


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
