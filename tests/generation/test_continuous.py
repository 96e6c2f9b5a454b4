"""Continuous batching: whatever enters, leaves or is shared, a completion is what it is alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.batching import capacity, continuous
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.model.cache import BLOCK_TOKENS, page_bytes
from hybrid_rlhf.generation.sampling import per_request
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.models.families import FAMILIES
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import user_error
from tests.support.families import VARIANTS, variant
from tests.support.generation import (
    PROMPTS,
    SAMPLED,
    STOP_TOKEN_IDS,
    SYSTEM_PROMPT,
    completions_alone,
    engine_of,
    keep_in_flight,
    random_tokens,
    requests_for,
    token_ids_of,
)
from tests.support.marks import faults, slow
from tests.support.routes import assert_own_routes
from tests.support.tiny import tiny_model, tiny_tokenizer


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 15), chunk=st.sampled_from([1, 3, 16, 1000]))
def test_a_completion_does_not_depend_on_its_batch(rows: int, chunk: int) -> None:
    engine = engine_of(stop=STOP_TOKEN_IDS, max_batch_rows=rows, prefill_tokens=chunk)
    assert token_ids_of(engine.generate(PROMPTS, SAMPLED)) == completions_alone()


QUICK = (
    *("mistral", "gemma2", "gemma3", "gemma4 that shares keys", "gpt_oss", "deepseek_v3", "llama4", "bloom"),
    *(
        "falcon rw",
        "opt",
        "qwen3_5",
        "jamba",
        "granite 4",
        "lfm2_moe",
        "minimax",
        "falcon_h1 with a norm after the gate",
    ),
)
RECURRENT = [name for name, (family, _) in VARIANTS.items() if FAMILIES[family].recurrence is not None]


@pytest.mark.parametrize("name", [*QUICK, *(faults(name) for name in RECURRENT if name not in QUICK)])
def test_windows_caps_biases_and_states_hold_in_chunks_and_shared_prefixes(name: str) -> None:
    """In steps that mix rows and chunks, with rows that move when others finish, and a prompt whose samples enter one
    by one."""
    model = variant(name)
    module = token_ids_of(engine_of(model, STOP_TOKEN_IDS, backend="module").generate(PROMPTS, SAMPLED))
    for rows, chunk in ((None, None), (3, 5), (14, 23)):
        engine = engine_of(model, STOP_TOKEN_IDS, max_batch_rows=rows, prefill_tokens=chunk)
        assert token_ids_of(engine.generate(PROMPTS, SAMPLED)) == module
        assert not engine.backend.workspace.slots.any()


def test_the_prompt_of_n_samples_is_read_once(read: list[int]) -> None:
    prompt, params = random_tokens(40), SamplingParams(max_new_tokens=3, n=8, seed=0)
    engine_of().generate([prompt], params)
    assert read == [40, 8, 8]
    read.clear()
    engine_of(max_batch_rows=6).generate([prompt], params)
    assert read == [40, 6, 6, 1, 2, 2], "two samples came late, and computed the last token of the prompt"


def test_a_common_prefix_is_read_once(read: list[int]) -> None:
    engine_of().generate(
        [SYSTEM_PROMPT + [5, 6], SYSTEM_PROMPT + [7], SYSTEM_PROMPT + [8, 9, 10]],
        SamplingParams(max_new_tokens=2, seed=0),
    )
    shared = len(SYSTEM_PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    assert read == [3 * len(SYSTEM_PROMPT) + 6 - 2 * shared, 3], "in the step that computes it"


def test_prompts_and_turns_are_cached_until_the_weights_change(read: list[int]) -> None:
    model, prompt = tiny_model(), random_tokens(40)
    engine = engine_of(model)
    params = SamplingParams(max_new_tokens=9, temperature=0.0)
    ((first,),) = engine.generate([prompt], params)
    read.clear()
    assert engine.generate([prompt], params)[0][0].token_ids == first.token_ids
    assert read == [1] * 9, "of the prompt, only the last token is computed again"
    read.clear()
    turn = prompt + first.token_ids + random_tokens(5)
    ((second,),) = engine.generate([turn], params)
    assert read == [6] + [1] * 8, "the last sampled token and the five new ones"
    alone = engine_of(model).generate([turn], params)
    assert second.token_ids == alone[0][0].token_ids
    for change in (
        lambda: engine.backend.sync_weights(engine.backend.decoder),
        lambda: model.get_input_embeddings().weight.mul_(1.1),  # training in place, without a weight sync
    ):
        with torch.no_grad():
            change()
        read.clear()
        engine.generate([prompt], params)
        assert read[0] == 40


@pytest.mark.parametrize(
    ("name", "spare_blocks", "chunk"),
    [
        *(("llama of three heads", 0, 7), ("llama of three heads", 9, 1000), ("mistral", 3, 7), ("gpt_oss", 0, 1000)),
        *(slow("deepseek_v3", 3, 7), ("qwen3_5", 0, 1000), slow("qwen3_5_moe", 9, 7), slow("falcon_h1", 3, 1000)),
        slow("qwen3_moe", 0, 7),
    ],
)
def test_requests_that_are_preempted_go_on_where_they_were(
    name: str, spare_blocks: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for little more than the longest request, and completions that are longer than expected; recorded
    experts are those of the model's own routers."""
    # A seed whose numbers keep away from the boundaries between tokens, where the last bit of the logits decides.
    model, sampling = variant(name), replace(SAMPLED, max_new_tokens=40, seed=9)
    prompts = [*PROMPTS, *(random_tokens(10) for _ in range(5))]
    free = engine_of(model, range(3, 6))
    records = free.records_routes
    expected = free.generate(prompts, sampling, record_routes=records)
    monkeypatch.setattr(continuous.ExpectedLength, "of", lambda self, limit: 1.0)
    monkeypatch.setattr(capacity.Sequences, "least_pages", lambda self, rows: self.longest_pages)
    cache = free.backend.held.cache
    pages = 1 + cache.layout.pages_of(44 + 40, computed_together=chunk) + spare_blocks * cache.layout.tables
    monkeypatch.setattr(capacity, "_SAVED_STATES_SHARE", 1.0)
    states = 73 * free.backend.decoder.state_bytes  # of 24 rows, two saved for each, and of the slot that nobody reads
    tight = engine_of(
        model,
        range(3, 6),
        kv_cache_gib=(pages * page_bytes(cache.layout, torch.float32) + states) / 2**30,
        prefill_tokens=chunk,
    )
    found = tight.generate(prompts, sampling, record_routes=records)
    assert tight.backend.held.cache.pages == pages and tight.backend.held.rows == 24
    assert token_ids_of(found) == token_ids_of(expected)
    for mine, theirs in zip(sum(found, []), sum(expected, []), strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    if records:
        assert_own_routes(model, prompts, found)
    assert tight.backend.preemptions > 0
    assert tight.backend.held.pool.used_pages == 0, "all blocks are given back"


def test_a_stream_is_the_completion_and_leaves_no_block_behind() -> None:
    """Also where its caller stops early."""
    engine = engine_of(stop=STOP_TOKEN_IDS)
    prompt, params = random_tokens(40), SamplingParams(max_new_tokens=30, seed=1, min_new_tokens=5)
    ((completion,),) = engine.generate([prompt], params)
    assert list(engine.stream(prompt, params)) == completion.token_ids
    stream = engine.stream(prompt, params)
    next(stream), next(stream)
    assert engine.backend.held.pool.used_pages == 3
    stream.close()
    assert engine.backend.held.pool.used_pages == 0
    assert token_ids_of(engine.generate(PROMPTS, SAMPLED)) == completions_alone()


def test_rows_that_have_ended_leave_and_others_enter(read: list[int]) -> None:
    prompts = [[100 + i, *random_tokens(3)] for i in range(24)]
    params = SamplingParams(max_new_tokens=40, seed=1)
    engine = engine_of(stop=range(3, 60), max_batch_rows=8)
    results = engine.generate(prompts, params)
    lengths = [len(completion.token_ids) for (completion,) in results]
    assert len(set(lengths)) > 3
    assert sum(read) == 24 * 4 + sum(length - 1 for length in lengths), "no token is computed that nobody asked for"


def test_no_prompt_one_prompt_and_all_stopping_at_once() -> None:
    engine = engine_of(stop=range(259))
    assert engine.generate([], SAMPLED) == []
    for prompts in ([[4]], PROMPTS):
        for samples in engine.generate(prompts, SAMPLED):
            assert [(len(c.token_ids), c.finish_reason) for c in samples] == [(1, "stop")] * 2


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_a_table_of_positions_ends_a_completion_or_refuses_a_prompt(backend: str) -> None:
    engine = engine_of(variant("gpt2"), backend=backend)  # 128 positions
    (completion,) = engine.generate([random_tokens(120)], SamplingParams(max_new_tokens=20, temperature=0.0))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (8, "length")
    with user_error("has 128 positions, prompt 1 has 128 tokens"):
        engine.generate([random_tokens(3), random_tokens(128)], SAMPLED)


def test_stop_strings_end_with_the_token_that_completes_them() -> None:
    tokenizer = tiny_tokenizer()
    engine = engine_of(tokenizer=tokenizer)
    params = SamplingParams(max_new_tokens=30, seed=3)
    free = [samples[0].token_ids for samples in engine.generate(PROMPTS, params)]
    stops = tuple(tokenizer.decode(ids[6:9]) for ids in free)
    for prompt, ids, request in zip(PROMPTS, free, per_request(params, len(PROMPTS)), strict=True):
        (completion,) = engine.generate([prompt], [replace(request, stop=stops)])[0]
        ends = [end for end in range(1, 31) if any(stop in tokenizer.decode(ids[:end]) for stop in stops)]
        assert completion.token_ids == ids[: ends[0]] and completion.finish_reason == "stop"
        (held,) = engine.generate([prompt], [replace(request, stop=stops, min_new_tokens=30)])[0]
        assert held.token_ids == ids, "a stop string before the shortest length ends nothing"
    with user_error("stop needs a tokenizer"):
        GenerationEngine.from_model(tiny_model()).generate(PROMPTS, replace(params, stop=("a",)))


@pytest.mark.parametrize(("until", "in_flight"), [(None, 0), (None, 1), ([2], 0), ([2], 1)])
def test_results_that_are_split_later_are_those_of_each_step(
    until: list[int] | None, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over more steps than are kept, with rows that enter, move, end and are preempted; a stop string that never occurs
    needs each token. The other tests are shorter than what is kept."""
    appended = list[Request]()
    append = Request.append

    def counted(request: Request, *values: float) -> None:
        appended.append(request)
        append(request, *values)

    keep_in_flight(monkeypatch, in_flight)
    monkeypatch.setattr(Request, "append", counted)
    monkeypatch.setattr(continuous.ExpectedLength, "of", lambda self, limit: 1.0)
    monkeypatch.setattr(capacity.Sequences, "least_pages", lambda self, rows: self.longest_pages)
    prompts = [random_tokens(size) for size in (7, 30, 12, 3, 40)]
    params = [SamplingParams(max_new_tokens=300 - 40 * index, n=3, seed=index) for index in range(5)]
    model = tiny_model(max_position_embeddings=512)
    memory = 41 * BLOCK_TOKENS * 4 * 2 * 2 * 2 * 8 / 2**30  # of two of the longest requests
    found = []
    for stop in ((), ("a text that never occurs",)):
        tight = engine_of(model, [3, 4], tokenizer=tiny_tokenizer(), max_batch_rows=6, kv_cache_gib=memory)
        appended.clear()
        found.append(tight.generate(prompts, [replace(p, stop=stop) for p in params], until=until))
        completions = sum(found[-1], [])
        ended = sum(completion.finish_reason is not None for completion in completions)
        assert tight.backend.preemptions > 0
        assert (len(appended) == ended) == (not stop)
    assert found[0] == found[1]
    assert max(len(completion.token_ids) for completion in completions) > 2 * continuous._SPLIT_STEPS


def test_what_decoding_reads_and_computes_is_counted() -> None:
    """Bytes of weights once a step, their operations once a row, and both of what each row attends to."""
    lm = tiny_model()
    engine = engine_of(lm, max_batch_rows=2)
    engine.generate(
        [random_tokens(5), random_tokens(3)], [SamplingParams(max_new_tokens=length, seed=1) for length in (4, 6)]
    )
    products = sum(p.numel() for name, p in lm.named_parameters() if "norm" not in name)  # the tied head is one
    cached = 2 * 2 * 2 * 8  # layers, keys and values, heads, head size
    attended = (6 + 7 + 8) + (4 + 5 + 6 + 7 + 8)
    assert engine.work.bytes == 4 * (5 * products + cached * attended)
    heads = 2 * 4 * 8  # layers, heads, head size
    assert engine.work.operations == 2 * (3 + 5) * products + 4 * heads * attended


@given(prompt=st.integers(1, 12), tokens=st.integers(0, 12), window=st.none() | st.integers(1, 30))
def test_a_window_limits_what_decoding_attends_to(prompt: int, tokens: int, window: int | None) -> None:
    """Beside the sum over queries; without it, long rows of Gemma 3 would seem to read six times what they do."""
    (request,) = requests_for([SAMPLED], [1] * prompt)
    request.token_ids += [1] * tokens
    seen = [place if window is None else min(place, window) for place in range(prompt + 1, prompt + tokens)]
    assert request.attended_tokens(window) == sum(seen)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "gemma4 that shares keys"])
def test_operations_of_decoding_are_those_that_torch_counts(name: str) -> None:
    """Those of a token, with the experts that it passes through, and of a pair of query and key. Of latent attention
    only the former: the module computes attention in the plain form, decoding in the absorbed one."""
    lm = variant(name)
    lm.set_attn_implementation("eager")
    lm.set_experts_implementation("eager")
    decoder = decoder_of(lm, world=solo_world(torch.device("cpu")), dtype=torch.float32)
    assert decoder is not None

    def counted(tokens: int) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            lm(torch.full((1, tokens), 5), use_cache=False)
        return counter.get_total_flops()

    one, two = counted(1), counted(2)
    of_pair = (two - 2 * one) / 2
    assert decoder.token_operations == one - of_pair
    if name != "deepseek_v3":
        assert sum(cost.operations for cost in decoder.attention_costs.values()) == of_pair
