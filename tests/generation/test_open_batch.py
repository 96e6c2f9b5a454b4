"""Open batches: requests that enter and leave while others are decoded have the tokens that they have alone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch

from hybrid_rlhf.functional.logprobs import token_logprobs
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.backends import native
from hybrid_rlhf.generation.batching import capacity
from hybrid_rlhf.generation.batching.continuous import BatchLoad, ContinuousBatch
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.model.cache import CacheLayout, KVCache
from hybrid_rlhf.generation.open_batch import OpenBatch, PromptBatch, StreamedToken, Submission
from hybrid_rlhf.generation.sampling import Completion
from tests.support.clock import wait_until
from tests.support.devices import DEVICES
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.generation import (
    PROMPTS,
    SAMPLED,
    STOP_TOKEN_IDS,
    Steps,
    completed,
    completions_alone,
    engine_of,
    ids_of,
    keep_in_flight,
    random_tokens,
)
from tests.support.ranks import run_apart
from tests.support.tiny import tiny_model, tiny_tokenizer


def tiny_engine(**settings: object) -> GenerationEngine:
    return engine_of(stop=STOP_TOKEN_IDS, tokenizer=tiny_tokenizer(), **settings)


def submitted(batch: OpenBatch, prompts: list[list[int]], each: list[SamplingParams]) -> list[tuple[Submission, Steps]]:
    """A submission of each prompt."""
    submissions = []
    for prompt, params in zip(prompts, each, strict=True):
        steps = Steps()
        submissions.append((batch.submit(PromptBatch([prompt], [params]), steps.put), steps))
    return submissions


def all_of(steps: Steps) -> list[StreamedToken]:
    """The tokens of a completion, or those before its request ended without it."""
    tokens = []
    while not tokens or tokens[-1].finish_reason is None:
        new = steps.get(timeout=60)
        if not new:
            break
        tokens += new
    return tokens


@pytest.mark.parametrize(("backend", "rows"), [("auto", 3), ("auto", 64), ("module", 3)])
def test_requests_of_many_threads_have_the_tokens_that_they_have_alone(backend: str, rows: int) -> None:
    """Also those that need another part of sampling than all before them, which continues the batch in new tables."""
    kinds = [
        SAMPLED,
        replace(SAMPLED, temperature=0.0, n=1),
        replace(SAMPLED, top_p=0.8, temperature=0.7),
        replace(SAMPLED, repetition_penalty=1.3, stop_token_ids=(40, 41)),
        replace(SAMPLED, max_new_tokens=60, stop=("a", "be"), min_p=0.02),
    ]
    expected = [tiny_engine(backend=backend).generate(PROMPTS, kind) for kind in kinds]
    with tiny_engine(backend=backend).open(rows=rows, max_tokens=120) as batch:

        def client(index: int) -> list[list[list[StreamedToken]]]:
            time.sleep(0.01 * index)
            return completed(batch, PROMPTS, kinds[index])

        with ThreadPoolExecutor(len(kinds)) as pool:
            found = list(pool.map(client, range(len(kinds))))
    for completions, delivered in zip(expected, found, strict=True):
        for sample, stream in zip(sum(completions, []), sum(delivered, []), strict=True):
            assert [token.token_id for token in stream] == sample.token_ids
            assert [token.finish_reason for token in stream] == [None] * (len(stream) - 1) + [sample.finish_reason]
            assert [token.logprob for token in stream] == pytest.approx(sample.logprobs, abs=1e-4)


@pytest.mark.parametrize(("name", "chunk"), [("mistral", 4), ("qwen3_5", 1000)])
def test_a_cancelled_request_gives_back_its_row_and_blocks(name: str, chunk: int) -> None:
    """At any time: while it waits, while its prompt is computed, while it decodes. The others go on as before."""
    engine = engine_of(variant(name), prefill_tokens=chunk)
    prompts, sampling = [random_tokens(30), random_tokens(12)], SamplingParams(max_new_tokens=30, n=2, seed=3)
    expected = [[sample.token_ids for sample in samples] for samples in engine.generate(prompts, sampling)]
    steps = Steps()
    with engine.open(rows=7, max_tokens=200) as batch:
        long = replace(sampling, max_new_tokens=160)
        submissions = [batch.submit(PromptBatch([random_tokens(8 + place)], long), steps.put) for place in range(9)]
        batch.cancel(batch.submit(PromptBatch([random_tokens(20)], long), steps.put))  # before it is taken
        steps.get(timeout=60)
        done = threading.Thread(target=lambda: expected.append(ids_of(completed(batch, prompts, sampling))))
        done.start()
        for submission in submissions:
            batch.cancel(submission)
            time.sleep(0.003)
        done.join()
        assert expected.pop() == expected
        assert batch.unfinished == 0
        wait_until(lambda: batch.load == BatchLoad())
        assert engine.backend.held.pool.used_pages == 0


def test_an_idle_batch_uses_no_processor_time() -> None:
    with tiny_engine().open(rows=4, max_tokens=100) as batch:
        completed(batch, PROMPTS[:1], SAMPLED)
        wait_until(lambda: batch.load == BatchLoad())
        before = batch.call(time.thread_time).result()
        time.sleep(0.5)
        assert batch.call(time.thread_time).result() - before < 0.1


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_prompt_logprobs_are_those_of_the_training_forward(backend: str) -> None:
    model, prompt = tiny_model(), random_tokens(40)
    engine = engine_of(model, backend=backend)
    with engine.open(rows=2, max_tokens=100) as batch, torch.no_grad():
        found = batch.prompt_logprobs(prompt, top=3).result()
        ids = torch.tensor([prompt])
        expected = token_logprobs(model(ids).logits[:, :-1], labels=ids[:, 1:])[0]
        assert found.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        values, tokens = model(ids).logits[0, :-1].log_softmax(dim=-1).topk(3)
        top = torch.tensor(found.top)
        assert torch.equal(top[..., 0].long(), tokens)
        torch.testing.assert_close(top[..., 1], values, atol=1e-4, rtol=0)
        assert batch.prompt_logprobs([5]).result().logprobs == []


def test_what_is_too_long_or_does_not_fit_is_refused() -> None:
    with tiny_engine().open(rows=2, max_tokens=256) as batch:
        with user_error("at most 256 tokens together, prompt 1 has 200"):
            batch.submit(PromptBatch([[1], [1] * 200], SamplingParams(max_new_tokens=57)), lambda tokens: None)
        with user_error("top_k must be at most 2147483647, got 9223372036854775808"):
            batch.submit(PromptBatch([[1]], SamplingParams(top_k=2**63, max_new_tokens=5)), lambda tokens: None)
    with user_error("the KV cache must hold one completion of 200 tokens"):
        tiny_engine(kv_cache_gib=1e-6).open(rows=2, max_tokens=200)


def test_a_batch_that_ends_says_so_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed by its user, or ended by an error."""
    steps = Steps()
    long = SamplingParams(max_new_tokens=200, stop_token_ids=())
    batch = engine_of().open(rows=4, max_tokens=250)
    batch.submit(PromptBatch([random_tokens(3)], long), steps.put)
    batch.close()
    all_of(steps)
    with pytest.raises(RuntimeError, match="was closed"):
        batch.submit(PromptBatch([random_tokens(3)], long), steps.put)
    with pytest.raises(RuntimeError, match="was closed"):
        batch.prompt_logprobs([1, 2])
    batch = engine_of().open(rows=4, max_tokens=250)
    monkeypatch.setattr("hybrid_rlhf.generation.batching.requests.Request.append", lambda *_: 1 / 0)
    batch.submit(PromptBatch([random_tokens(3)], long), steps.put)
    assert steps.get(timeout=60) == []
    assert isinstance(batch.failure, ZeroDivisionError)
    batch.close()


def poison(monkeypatch: pytest.MonkeyPatch, seeds: set[int], *, after: int) -> None:
    """Let decoding fail with requests of some seeds, at a token."""
    append = Request.append

    def failing(request: Request, *values: float) -> None:
        append(request, *values)
        if request.params.seed in seeds and len(request.token_ids) > after:
            raise ArithmeticError

    monkeypatch.setattr(Request, "append", failing)


@pytest.mark.parametrize("backend", ["auto", "module"])
@pytest.mark.parametrize("after", [0, 3])
def test_an_exception_ends_only_the_requests_that_cause_it(
    backend: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others, which decode with them or wait, keep their tokens, and so do those that come later."""
    prompts = [random_tokens(5 + place) for place in range(12)]
    seeds = [100 + place for place in range(12)]
    each = [SamplingParams(max_new_tokens=20, seed=seed) for seed in seeds]
    engine = tiny_engine(backend=backend)
    expected = [
        engine.generate([prompt], [params])[0][0].token_ids for prompt, params in zip(prompts, each, strict=True)
    ]
    poisoned = {103, 110}
    poison(monkeypatch, poisoned, after=after)
    with engine.open(rows=5, max_tokens=120) as batch:
        failed = set()
        for place, (submission, steps) in enumerate(submitted(batch, prompts, each)):
            found = all_of(steps)
            if submission.error is None:
                assert [token.token_id for token in found] == expected[place], place
            else:
                failed.add(seeds[place])
        # A module continues no completion: what had begun beside a poisoned one ends with it.
        assert failed == poisoned if backend == "auto" or not after else failed >= poisoned
        assert batch.failure is None and batch.unfinished == 0
        wait_until(lambda: batch.load == BatchLoad())
        assert ids_of(completed(batch, PROMPTS, SAMPLED)) == completions_alone()


@pytest.mark.parametrize("others", [1, 10])
def test_a_request_that_arrives_while_others_are_tried_fails_alone(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in the first step after the trial, before any token of the others is delivered."""
    poison(monkeypatch, {100, 101}, after=0)
    isolate = OpenBatch._isolate
    late = []

    def with_arrival(batch: OpenBatch, error: Exception) -> None:
        if not late:
            late.append(
                batch.submit(PromptBatch(prompts[:1], [SamplingParams(seed=101, max_new_tokens=20)]), lambda _: None)
            )
        isolate(batch, error)

    monkeypatch.setattr(OpenBatch, "_isolate", with_arrival)
    prompts = [random_tokens(5 + place) for place in range(1 + others)]
    each = [SamplingParams(max_new_tokens=20, seed=seed, stop_token_ids=()) for seed in (100, *range(others))]
    with tiny_engine().open(rows=5, max_tokens=120) as batch:
        started = threading.Event()
        batch.call(started.wait)
        (first, _), *good = submitted(batch, prompts, each)
        started.set()
        for _, steps in good:
            all_of(steps)
        assert [submission.error for submission, _ in good] == [None] * others
        assert isinstance(first.error, ArithmeticError) and isinstance(late[0].error, ArithmeticError)


def test_requests_that_fail_together_alone_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding that fails with two requests and with neither alone would else be tried again for ever."""
    engine = tiny_engine()
    steps = Steps()
    launch = ContinuousBatch._launch

    def failing(batch: ContinuousBatch) -> None:
        if len(batch._waiting) + len(batch._live) > 1:
            raise ArithmeticError
        launch(batch)

    monkeypatch.setattr(ContinuousBatch, "_launch", failing)
    with engine.open(rows=5, max_tokens=120) as batch:
        submission = batch.submit(PromptBatch(PROMPTS[:2], SamplingParams(max_new_tokens=20, seed=1)), steps.put)
        all_of(steps)
        assert isinstance(submission.error, ArithmeticError) and batch.failure is None
        assert len(completed(batch, PROMPTS[:1], SamplingParams(max_new_tokens=5))[0][0]) <= 5


def test_a_client_that_cannot_take_tokens_ends_alone() -> None:
    """An exception in a delivery is not one of the batch."""
    with tiny_engine().open(rows=2, max_tokens=120) as batch:
        batch.submit(PromptBatch(PROMPTS[:1], SamplingParams(max_new_tokens=20)), lambda tokens: 1 / 0)
        assert ids_of(completed(batch, PROMPTS, SAMPLED)) == completions_alone()
        wait_until(lambda: batch.unfinished == 0)


def test_the_cache_of_an_open_batch_takes_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a host's free memory was reserved, and written, for a model of 135 million parameters."""

    def reserved(free: int, rows: int, share: float | None) -> int:
        monkeypatch.setattr(capacity, "free_bytes", lambda device: free)
        with tiny_engine().open(rows=rows, max_tokens=1600, memory_share=share) as batch:
            return batch.kv_cache_bytes

    one, many = reserved(10**12, 1, None), reserved(10**12, 40, None)
    assert 30 < many / one < 40.1
    assert reserved(10**12, 40, 0.001) == many  # no more than all rows need
    assert one < reserved(40 * one, 40, 0.125) <= 5 * one
    assert one <= reserved(40 * one, 40, 0.001) < 1.5 * one  # no less than one completion needs


def test_the_share_of_an_open_batch_does_not_limit_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` after `open` had the cache of the batch's share for good."""
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 2**24)
    plain, opened = tiny_engine(), tiny_engine()
    opened.open(rows=2, max_tokens=100, memory_share=0.001).close()
    for engine in (plain, opened):
        engine.generate(PROMPTS, SAMPLED)
    assert plain.backend.kv_cache_bytes == opened.backend.kv_cache_bytes


def make_a_large_cache() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    layout = CacheLayout.of_layers([None], [(4, 64)], stores=2)
    cache = KVCache(layout, pages=40_000, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.bytes > 1.2 * 2**30 and process.memory_info().rss - before < cache.bytes / 4
    assert not cache.keys[:, :5].any() and not cache.values[:, -5:].any()


def test_memory_of_a_large_cache_is_mapped_when_it_is_written() -> None:
    run_apart(make_a_large_cache)  # malloc has no memory of earlier tests to reuse


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_the_most_likely_tokens_are_those_of_the_full_softmax(backend: str) -> None:
    engine, sampling = tiny_engine(backend=backend), replace(SAMPLED, temperature=0.7, top_p=0.9, n=1)
    steps = Steps()
    with engine.open(rows=2, max_tokens=120) as batch:
        plain = completed(batch, PROMPTS[:1], sampling)[0][0]
        batch.submit(PromptBatch(PROMPTS[:1], sampling, top_logprobs=7), steps.put)
        found = all_of(steps)
    assert [token.token_id for token in found] == [token.token_id for token in plain]
    ids = [*PROMPTS[0], *(token.token_id for token in found)]
    with torch.no_grad():
        logits = tiny_model()(torch.tensor([ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
    values, tokens = torch.log_softmax(logits.float() / 0.7, dim=-1).topk(7)
    top = torch.tensor([token.top for token in found])
    assert torch.equal(top[..., 0].long(), tokens)
    torch.testing.assert_close(top[..., 1], values, atol=1e-4, rtol=1e-4)


def test_an_open_batch_computes_few_prompt_tokens_at_once(monkeypatch: pytest.MonkeyPatch, read: list[int]) -> None:
    """Everybody else waits for a prefill: with 16,384 tokens, as on a GPU, for half a second at 7B."""
    monkeypatch.setitem(native.PREFILL_TOKENS, "cpu", 16384)
    engine = engine_of()
    short = SamplingParams(max_new_tokens=2)
    with engine.open(rows=1, max_tokens=3000) as batch:
        completed(batch, [[5] * 2500], short)
    assert read[:2] == [2048, 452]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_new_weights_reach_running_requests(
    name: str, recompute: bool, in_flight: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens say which weights sampled them; recomputed keys and values are those of the newer weights, and a later
    prompt never reads those of the older ones, in attention or in recurrent layers."""
    keep_in_flight(monkeypatch, in_flight)
    newer_model = variant(name, seed=1).to(device)
    older = engine_of(variant(name, seed=0).to(device))
    newer = engine_of(newer_model)
    prompt = random_tokens(40)
    sampling = SamplingParams(max_new_tokens=60, seed=3)
    steps = Steps()
    with older.open(rows=4, max_tokens=160) as batch:
        batch.submit(PromptBatch([prompt], [sampling]), steps.put)
        before = [token for _ in range(9) for token in steps.get(timeout=60)]
        with batch.paused():
            older.backend.sync_weights(older._shared.replaced(newer_model))
            batch.renew(7, recompute=recompute)
            before += [token for _ in range(steps.qsize()) for token in steps.get_nowait()]
        tokens = before + all_of(steps)
        later = completed(batch, [prompt], replace(sampling, seed=4))
    completion = tokens[-1].completion
    assert completion.token_ids == [token.token_id for token in tokens]
    count = len(before)
    assert completion.weight_versions == [0] * count + [7] * (len(tokens) - count)
    (alone,) = newer.generate([prompt], replace(sampling, seed=4))
    (fresh,) = later[0]
    assert alone[0].token_ids == [token.token_id for token in fresh]
    assert alone[0].logprobs == pytest.approx([token.logprob for token in fresh], abs=1e-4)
    begun = Completion(completion.token_ids[:count], completion.logprobs[:count], None, completion.logprobs[:count])
    continued = newer.generate([prompt], [sampling], begun=[[begun]])[0][0]
    equal = continued.logprobs[count:] == pytest.approx(completion.logprobs[count:], abs=1e-4)
    assert equal == recompute, "kept keys and values are of the older weights"


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_first_token_of_a_request_is_there_within_two_steps(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While others decode: the step that runs when it arrives, and that of its prompt; on a GPU, a step that was
    launched ahead comes before. A running request has a token of each step, so its tokens count them, whatever the load
    of the machine."""
    keep_in_flight(monkeypatch, ahead)
    long = replace(SAMPLED, max_new_tokens=1000, min_new_tokens=1000, n=1)
    short = replace(long, max_new_tokens=2, min_new_tokens=2)
    engine = engine_of(tiny_model(max_position_embeddings=1500))
    counted = []
    """Tokens of a running request."""
    waited, done = [], threading.Event()
    with engine.open(rows=16, max_tokens=1200) as batch:

        def arrive(number: int) -> None:
            """In the thread of the batch, and the next one at its first token: it does not wait for this thread."""
            arrived, got = len(counted), []

            def take(tokens: list[StreamedToken]) -> None:
                if not got:
                    waited.append(len(counted) - arrived)
                    arrive(number + 1) if number < 40 else done.set()
                got.extend(tokens)

            batch.submit(PromptBatch([random_tokens(20 + number)], short), take)

        takers = [counted.extend, *[lambda _: None] * 7]
        running = [batch.submit(PromptBatch([[5, 6, place]], long), taker) for place, taker in enumerate(takers)]
        wait_until(lambda: bool(counted))
        batch.call(lambda: arrive(1))
        assert done.wait(120)
        assert len(counted) < 1000, "it ran all the while"
        for submission in running:
            batch.cancel(submission)
    assert max(waited) <= 2 + ahead, waited
