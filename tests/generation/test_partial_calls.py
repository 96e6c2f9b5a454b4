"""Calls that end when enough prompts are finished: where they end follows from tokens, and later calls continue."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rlhf.generation import Completion
from hybrid_rlhf.generation.sampling import FinishedShare, per_request
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.generation import (
    PROMPTS,
    SAMPLED,
    STOP_TOKEN_IDS,
    completions_alone,
    engine_of,
    keep_in_flight,
    token_ids_of,
)

SHARE = FinishedShare(3, frozenset({6}))
PARAMS = per_request(SAMPLED, len(PROMPTS))


def end_of(share: FinishedShare, left: list[list[int]]) -> float:
    """The slow twin of the end of a call: new tokens per completion, given the tokens that each still needs."""
    needed = [max(samples) for samples in left]
    tokens = 0
    while sum(need <= tokens for need in needed) < share.prompts or any(needed[i] > tokens for i in share.required):
        tokens += 1
    return tokens


def lengths_of(results: list[list[Completion]]) -> list[list[int]]:
    return [[len(completion.token_ids) for completion in samples] for samples in results]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_rows": 3, "prefill_tokens": 5},
        {"max_batch_rows": 1},
        {"steps_in_flight": 1},  # as on a GPU
    ],
    ids=str,
)
def test_a_call_ends_where_the_tokens_say(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dict(settings)
    whole, flying = completions_alone(), settings.pop("steps_in_flight", 0)
    if flying:
        keep_in_flight(monkeypatch, flying)
    found: list[list[Completion]] = []
    for version in range(3):
        engine = engine_of(stop=STOP_TOKEN_IDS, **settings)
        engine.weight_version = version
        before = lengths_of(found) if found else [[0] * SAMPLED.n for _ in PROMPTS]
        left = [
            [len(tokens) - had for tokens, had in zip(samples, begun, strict=True)]
            for samples, begun in zip(whole, before, strict=True)
        ]
        tokens = end_of(SHARE, left)
        found = engine.generate(PROMPTS, PARAMS, begun=found, until=SHARE)
        for place, samples in enumerate(found):
            for sample, completion in enumerate(samples):
                full, had = whole[place][sample], before[place][sample]
                assert completion.token_ids == full[: had + tokens], "no more and no fewer tokens"
                assert (completion.finish_reason is None) == (len(completion.token_ids) < len(full))
                assert completion.weight_versions[had:] == [version] * (len(completion.token_ids) - had)
                assert len(completion.logprobs) == len(completion.sampling_logprobs) == len(completion.token_ids)
        if version == 0:
            assert any(sample.finish_reason is None for samples in found for sample in samples)
    last = engine_of(stop=STOP_TOKEN_IDS).generate(PROMPTS, PARAMS, begun=found[:5])
    assert token_ids_of(last) == whole and all(sample.finish_reason for samples in last for sample in samples)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gemma3"])
def test_models_with_experts_states_and_windows_continue(name: str) -> None:
    engine = engine_of(variant(name), STOP_TOKEN_IDS)
    records = engine.records_routes
    whole = engine.generate(PROMPTS, PARAMS, record_routes=records)
    part = engine.generate(PROMPTS, PARAMS, until=FinishedShare(1), record_routes=records)
    assert any(sample.finish_reason is None for samples in part for sample in samples)
    continued = engine.generate(PROMPTS, PARAMS, begun=part, record_routes=records)
    assert token_ids_of(continued) == token_ids_of(whole)
    for samples, expected in zip(continued, whole, strict=True):
        for sample, other in zip(samples, expected, strict=True):
            assert (sample.routes is None) == (not records)
            if sample.routes is not None and other.routes is not None:
                assert (sample.routes == other.routes).all()


def test_a_call_with_nothing_to_do_returns_what_there_is() -> None:
    engine = engine_of(stop=STOP_TOKEN_IDS)
    whole = engine.generate(PROMPTS, PARAMS)
    found = engine.generate(PROMPTS, PARAMS, begun=whole[:2], until=FinishedShare(2))
    assert found[:2] == whole[:2]
    assert all(not sample.token_ids and sample.finish_reason is None for samples in found[2:] for sample in samples)


def test_the_module_does_not_continue() -> None:
    engine = engine_of(stop=STOP_TOKEN_IDS, backend="module")
    with user_error("begun and until need inference weights"):
        engine.generate(PROMPTS, PARAMS, until=FinishedShare(2))
