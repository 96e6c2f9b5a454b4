"""Speculative decoding: whatever is drafted, a completion has the tokens and log-probs that it has without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation import Completion, Drafter, GenerationEngine, SamplingParams
from hybrid_rlhf.generation.batching import capacity, rows
from hybrid_rlhf.generation.batching.continuous import ContinuousBatch
from hybrid_rlhf.generation.batching.requests import DecodeWork, Request
from hybrid_rlhf.generation.drafting import trial
from hybrid_rlhf.generation.drafting.drafter import CallDrafts
from hybrid_rlhf.generation.ops import cpu_kernels
from hybrid_rlhf.runtime.world import World
from tests.support.families import variant
from tests.support.generation import PROMPTS, SAMPLED, STOP_TOKEN_IDS, keep_in_flight, random_tokens, token_ids_of
from tests.support.tiny import tiny_model, tiny_tokenizer

PARAMS = replace(SAMPLED, max_new_tokens=30)
DRAFT_TOKENS = 4
Results = list[list[Completion]]


class Scripted(Drafter):
    """Drafts that a function makes of the completions of an earlier call, and the tokens that a request has."""

    def __init__(self, results: Results, draft: Callable[[Sequence[int], int], list[int]], *, cut: bool = True) -> None:
        super().__init__("ngram", draft_tokens=DRAFT_TOKENS, always=True)
        self._known = [sample.token_ids for samples in results for sample in samples]
        self._draft, self._cut = draft, cut

    def begin(self, requests: Sequence[Request], world: World) -> CallDrafts:
        known, draft = dict(zip(requests, self._known, strict=True)), self._draft

        class Source:
            def propose(self, request: Request, most: int) -> list[int]:
                return draft(known[request], len(request.token_ids))[:most]

            def observe(self, request: Request) -> None:
                pass

        class Uncut(CallDrafts):
            def propose(self, request: Request) -> list[int]:
                left = len(request.uniforms) - len(request.token_ids) - 1
                return self._source.propose(request, min(self._most, left))

        return (CallDrafts if self._cut else Uncut)(self, Source(), world)


def flawed(seed: int = 0) -> Callable[[Sequence[int], int], list[int]]:
    """Of any length, and wrong from any place on."""
    chance = random.Random(seed)

    def draft(known: Sequence[int], at: int) -> list[int]:
        right = list(known[at : at + chance.randint(0, DRAFT_TOKENS)])
        wrong = chance.randint(0, 6)
        return [token if place < wrong else 3 + (token + 1) % 250 for place, token in enumerate(right)]

    return draft


def exact(known: Sequence[int], at: int) -> list[int]:
    return list(known[at : at + DRAFT_TOKENS])


def assert_same(found: Results, expected: Results) -> None:
    assert token_ids_of(found) == token_ids_of(expected)
    for mine, theirs in zip(sum(found, []), sum(expected, []), strict=True):
        assert mine.finish_reason == theirs.finish_reason
        for name in ("logprobs", "sampling_logprobs"):
            one, other = torch.tensor(getattr(mine, name)), torch.tensor(getattr(theirs, name))
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def assert_drafts_change_nothing(make: Callable[[], GenerationEngine], prompts: Any, params: Any) -> DecodeWork:
    """In an engine of its own, so that no prefix is cached; returns the work of the steps with drafts."""
    expected = make().generate(prompts, params)
    engine = make()
    assert_same(engine.generate(prompts, params, drafter=Scripted(expected, flawed())), expected)
    work = engine.work
    assert 0 < work.accepted < work.drafted and work.tokens == work.row_steps + work.accepted
    return work


EACH = [
    SamplingParams(max_new_tokens=20 + number, seed=number, n=2, **settings)
    for number, settings in enumerate(
        [
            {"temperature": 0.0},
            {"temperature": 0.6},
            {"top_k": 7},
            {"top_p": 0.7},
            {"min_p": 0.05},
            {"repetition_penalty": 1.7},
            {"min_new_tokens": 12},
        ]
    )
]
"""One for each prompt."""


@pytest.mark.parametrize("params", [*EACH, EACH], ids=lambda params: "all" if isinstance(params, list) else None)
def test_tokens_and_logprobs_are_those_without_drafts(params: Any) -> None:
    model = tiny_model()
    assert_drafts_change_nothing(
        lambda: GenerationEngine.from_model(model, stop_token_ids=STOP_TOKEN_IDS), PROMPTS, params
    )


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    "name", ["mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "llama4", "qwen3_moe", "bloom", "opt", "gpt2"]
)
def test_windows_latents_experts_and_biases_hold_for_drafts(
    name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While prompts enter in chunks, and completions leave."""
    if not kernels:
        monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    model = variant(name)
    make = lambda: GenerationEngine.from_model(  # noqa: E731
        model, stop_token_ids=STOP_TOKEN_IDS, max_batch_rows=5, prefill_tokens=5
    )
    assert_drafts_change_nothing(make, PROMPTS, PARAMS)


@pytest.mark.parametrize("name", ["llama of three heads", "mistral", "deepseek_v3"])
@pytest.mark.parametrize("spare_blocks", [0, 3])
def test_drafts_take_no_memory_that_others_need(name: str, spare_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are preempted when blocks run out, and go on; all blocks are given back."""
    model, params = variant(name), replace(SAMPLED, max_new_tokens=40)
    prompts = [*PROMPTS, *(random_tokens(10) for _ in range(5))]
    free = GenerationEngine.from_model(model, stop_token_ids=range(3, 6))
    expected = free.generate(prompts, params)
    monkeypatch.setattr(rows.ExpectedLength, "of", lambda self, limit: 1.0)
    monkeypatch.setattr(capacity.Sequences, "least_pages", lambda self, rows: self.longest_pages)
    cache = free.backend.held.cache  # type: ignore[attr-defined]
    pages = 1 + cache.layout.pages_of(44 + 40, computed_together=7) + spare_blocks * cache.layout.tables
    tight = GenerationEngine.from_model(
        model,
        stop_token_ids=range(3, 6),
        kv_cache_gib=pages * cache.layout.stores * cache.keys[:, 0].nbytes / 2**30,
        prefill_tokens=7,
    )
    assert_same(tight.generate(prompts, params, drafter=Scripted(expected, flawed())), expected)
    assert tight.backend.held.cache.pages == pages  # type: ignore[attr-defined]
    assert tight.backend.preemptions > 0 and tight.work.accepted > 0  # type: ignore[attr-defined]
    assert tight.backend.held.pool.used_pages == 0  # type: ignore[attr-defined]


def test_what_drafts_leave_in_the_cache_serves_later_turns() -> None:
    model, prompt = tiny_model(), random_tokens(21)
    expected = GenerationEngine.from_model(model, stop_token_ids=()).generate([prompt], PARAMS)
    engine = GenerationEngine.from_model(model, stop_token_ids=())
    engine.generate([prompt], PARAMS, drafter=Scripted(expected, flawed()))
    turns = [prompt + sample.token_ids + random_tokens(5) for sample in expected[0]]
    alone = GenerationEngine.from_model(model, stop_token_ids=()).generate(turns, PARAMS)
    assert token_ids_of(engine.generate(turns, PARAMS)) == token_ids_of(alone)


def test_kept_and_drafted_tokens_are_counted() -> None:
    """10 tokens, of which prefill samples the first: drafts of one right token and a wrong one keep two a step."""
    model, params = tiny_model(), SamplingParams(max_new_tokens=10, temperature=0.0)
    engine = GenerationEngine.from_model(model, stop_token_ids=())
    expected = engine.generate([PROMPTS[0]], params)
    plain = engine.work
    assert (plain.steps, plain.row_steps, plain.tokens, plain.drafted, plain.accepted) == (9, 9, 9, 0, 0)

    def draft(known: Sequence[int], at: int) -> list[int]:
        return [known[at], (known[at + 1] + 1) % 259]

    engine.generate([PROMPTS[0]], params, drafter=Scripted(expected, draft))
    work = engine.work - plain
    # Places 1, 3, 5, 7 of the completion draft two tokens and keep one of them; place 9 has no room for a draft.
    assert (work.steps, work.row_steps, work.tokens, work.drafted, work.accepted) == (5, 5, 9, 8, 4)
    assert work.bytes == plain.bytes - 4 * engine.backend.decoder.product_bytes  # type: ignore[attr-defined]


def test_tokens_behind_a_stop_token_or_a_stop_string_are_dropped() -> None:
    model, params = tiny_model(), replace(PARAMS, n=1)
    free = GenerationEngine.from_model(model, stop_token_ids=()).generate(PROMPTS, params)
    stops = {sample.token_ids[6] for (sample,) in free}
    make = lambda **settings: GenerationEngine.from_model(model, **settings)  # noqa: E731
    expected = make(stop_token_ids=stops).generate(PROMPTS, params)
    assert {sample.finish_reason for (sample,) in expected} == {"stop"}
    engine = make(stop_token_ids=stops)
    found = engine.generate(PROMPTS, params, drafter=Scripted(free, exact, cut=False))
    assert_same(found, expected)
    assert engine.work.accepted == engine.work.tokens - engine.work.row_steps < engine.work.drafted
    # A draft without the stop token and what is behind it keeps as many tokens.
    cut = make(stop_token_ids=stops)
    assert_same(cut.generate(PROMPTS, params, drafter=Scripted(free, exact)), expected)
    assert cut.work.row_steps == engine.work.row_steps and cut.work.drafted < engine.work.drafted
    tokenizer = tiny_tokenizer()
    strings = replace(params, stop=tuple(tokenizer.decode(sample.token_ids[5:7]) for (sample,) in free))
    settings: dict[str, Any] = {"stop_token_ids": (), "tokenizer": tokenizer}
    expected = make(**settings).generate(PROMPTS, strings)
    assert_same(make(**settings).generate(PROMPTS, strings, drafter=Scripted(free, exact)), expected)


@pytest.mark.parametrize("draft_tokens", [1, 4, 40])
def test_a_perfect_draft_divides_the_steps(draft_tokens: int) -> None:
    """The completions of the same seeds; the limit of the completion bounds the last draft."""
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=())
    drafter = Drafter("previous", draft_tokens=draft_tokens, always=True)
    params = replace(PARAMS, max_new_tokens=21)
    expected = engine.generate(PROMPTS, params, drafter=drafter)
    first = engine.work
    assert first.steps == 20 and not first.drafted, "nothing is known of the first epoch"
    assert_same(engine.generate(PROMPTS, params, drafter=drafter), expected)
    again = engine.work - first
    assert again.accepted == again.drafted
    assert again.steps == -(-20 // (1 + draft_tokens))


def test_previous_completions_are_followed_again_after_a_difference() -> None:
    """Weights that have changed a little sample other tokens here and there."""
    model = tiny_model()
    engine = GenerationEngine.from_model(model, stop_token_ids=())
    drafter = Drafter("previous", always=True)
    params = SamplingParams(max_new_tokens=60, temperature=0.2, seed=1, n=2)
    engine.generate(PROMPTS, params, drafter=drafter)
    before = engine.work
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.003 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    fresh = GenerationEngine.from_model(model, stop_token_ids=())
    found = fresh.generate(PROMPTS, params, drafter=drafter)
    assert_same(found, GenerationEngine.from_model(model, stop_token_ids=()).generate(PROMPTS, params))
    work = fresh.work
    assert 0 < work.accepted < work.drafted and work.row_steps < before.row_steps


def test_ngrams_draft_what_a_group_repeats() -> None:
    """Greedy samples of one prompt: the later ones, which come when there is room, repeat the first."""
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=(), max_batch_rows=1)
    params = SamplingParams(max_new_tokens=31, temperature=0.0, n=3)
    expected = engine.generate([PROMPTS[0]], params)
    before = engine.work
    assert_same(engine.generate([PROMPTS[0]], params, drafter=Drafter("ngram", always=True)), expected)
    work = engine.work - before
    assert work.row_steps <= 30 + 2 * (1 + 30 // 5 + 1)


def test_drafts_go_on_and_off_while_steps_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: steps without drafts are launched before the result of the one before is known."""
    monkeypatch.setattr(trial, "MEASURED_STEPS", 2)
    monkeypatch.setattr(trial, "KEPT_STEPS", 3)
    launched = list[int]()
    launch = ContinuousBatch._launch

    def counted(self: ContinuousBatch, drafts: list[list[int]] | None) -> None:
        launched.append(len(self._in_flight))
        assert drafts is None or not self._in_flight, "a draft continues all tokens"
        launch(self, drafts)

    keep_in_flight(monkeypatch, 1)
    monkeypatch.setattr(ContinuousBatch, "_launch", counted)
    model, prompts = tiny_model(), [*PROMPTS, *(random_tokens(10) for _ in range(5))]
    make = lambda: GenerationEngine.from_model(  # noqa: E731
        model, stop_token_ids=STOP_TOKEN_IDS, max_batch_rows=6, prefill_tokens=9
    )
    expected = make().generate(prompts, PARAMS)
    drafter = Scripted(expected, flawed())
    drafter.trial = trial.DraftTrial()
    launched.clear()
    engine = make()
    assert_same(engine.generate(prompts, PARAMS, drafter=drafter), expected)
    assert set(launched) == {0, 1} and engine.work.accepted > 0 and drafter.trial.pays is not None


def test_a_stream_and_a_closed_generator_give_blocks_back() -> None:
    drafter = Drafter("ngram", always=True)
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=())
    params = SamplingParams(max_new_tokens=20, seed=3)
    whole = list(engine.stream(PROMPTS[1], params))
    drafting = GenerationEngine(engine.backend, drafter=drafter)
    assert list(drafting.stream(PROMPTS[1], params)) == whole
    stream = drafting.stream(PROMPTS[1], params)
    next(stream)
    stream.close()
    assert engine.backend.held.pool.used_pages == 0  # type: ignore[attr-defined]


def test_what_cannot_verify_drafts_refuses_them() -> None:
    for model, settings, reason in (
        (variant("qwen3_5"), {}, "a drafter needs attention in every layer, got a model with recurrent layers"),
        (tiny_model(), {"backend": "module"}, "a drafter needs inference weights, got the model's own module"),
    ):
        engine = GenerationEngine.from_model(model, **settings)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=reason):
            engine.generate(PROMPTS, PARAMS, drafter=Drafter("ngram"))
    with pytest.raises(UserError, match="drafts are ngram or previous, got eagle"):
        Drafter("eagle")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="draft_tokens must be 1 or more, got 0"):
        Drafter("ngram", draft_tokens=0)


def test_memory_of_a_step_counts_the_places_of_drafts() -> None:
    """Rows that have room without drafts do not with them; a cache of such rows is not used for drafts."""
    model = tiny_model()
    engine = GenerationEngine.from_model(model, stop_token_ids=())
    engine.generate(PROMPTS, PARAMS)
    held = engine.backend.held  # type: ignore[attr-defined]
    engine.generate(PROMPTS, PARAMS, drafter=Drafter("ngram", draft_tokens=7))
    assert engine.backend.held is not held and engine.backend.held.wanted[2] == 8  # type: ignore[attr-defined]
    drafting = engine.backend.held  # type: ignore[attr-defined]
    engine.generate(PROMPTS, PARAMS)
    assert engine.backend.held is drafting  # type: ignore[attr-defined]
