"""Calls that end when some of their prompts are finished: later calls continue the others."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rlhf.generation import Completion
from hybrid_rlhf.generation.sampling import per_request
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

PARAMS = per_request(SAMPLED, len(PROMPTS))
ROWS = 6


def lengths_of(results: list[list[Completion]]) -> list[list[int]]:
    return [[len(completion.token_ids) for completion in samples] for samples in results]


@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_tokens": 5}, {"max_batch_rows": 1}, {"steps_in_flight": 1}],  # one in flight as on a GPU
    ids=str,
)
def test_a_call_ends_with_the_prompts_that_it_must_finish(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call finishes one prompt more; the tokens are those of each prompt alone, of the version that it says."""
    settings = dict(settings)
    whole, flying = completions_alone(), settings.pop("steps_in_flight", 0)
    if flying:
        keep_in_flight(monkeypatch, flying)
    found = []
    finished = []
    for version in range(len(PROMPTS)):
        engine = engine_of(stop=STOP_TOKEN_IDS, **settings)
        engine.weight_version = version
        before = lengths_of(found) if found else [[0] * SAMPLED.n for _ in PROMPTS]
        counted = []
        found = engine.generate(
            PROMPTS, PARAMS, begun=found, until=range(version + 1), rows=ROWS, on_completed=counted.append
        )
        finished.append(sum(counted))
        for place, samples in enumerate(found):
            for sample, completion in enumerate(samples):
                full, had = whole[place][sample], before[place][sample]
                assert completion.token_ids == full[: len(completion.token_ids)] and len(completion.token_ids) >= had
                assert (completion.finish_reason is None) == (len(completion.token_ids) < len(full))
                assert completion.weight_versions[had:] == [version] * (len(completion.token_ids) - had)
                assert len(completion.logprobs) == len(completion.sampling_logprobs) == len(completion.token_ids)
        assert all(sample.finish_reason for samples in found[: version + 1] for sample in samples)
        if version == 0:
            assert any(sample.finish_reason is None for samples in found for sample in samples)
    assert token_ids_of(found) == whole and 0 < sum(finished) <= SAMPLED.n * len(PROMPTS)


def test_progress_does_not_depend_on_earlier_calls() -> None:
    """A cache that held more rows before let more prompts begin, so that a resumed run differed."""

    def progress(*, warm: bool) -> list[list[int]]:
        engine = engine_of(stop=STOP_TOKEN_IDS)
        if warm:
            engine.generate([[30 + place, 31] for place in range(4 * len(PROMPTS))], SAMPLED)
        return lengths_of(engine.generate(PROMPTS, PARAMS, until=[0], rows=SAMPLED.n))

    cold = progress(warm=False)
    assert cold == progress(warm=True) and not any(cold[-1]), "the last prompt waits for a row"


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gemma3"])
def test_models_with_experts_states_and_windows_continue(name: str) -> None:
    engine = engine_of(variant(name), STOP_TOKEN_IDS)
    records = engine.records_routes
    whole = engine.generate(PROMPTS, PARAMS, record_routes=records)
    shortest = min(range(len(PROMPTS)), key=lambda place: max(len(sample.token_ids) for sample in whole[place]))
    part = engine.generate(PROMPTS, PARAMS, until=[shortest], record_routes=records)
    assert any(sample.finish_reason is None for samples in part for sample in samples)
    continued = engine.generate(PROMPTS, PARAMS, begun=part, record_routes=records)
    assert token_ids_of(continued) == token_ids_of(whole)
    for samples, expected in zip(continued, whole, strict=True):
        for sample, other in zip(samples, expected, strict=True):
            assert (sample.routes is None) == (not records)
            assert not records or (sample.routes == other.routes).all()


def test_a_call_with_nothing_to_do_returns_what_there_is() -> None:
    engine = engine_of(stop=STOP_TOKEN_IDS)
    whole = engine.generate(PROMPTS, PARAMS)
    found = engine.generate(PROMPTS, PARAMS, begun=whole[:2], until=range(2))
    assert found[:2] == whole[:2]
    assert all(not sample.token_ids and sample.finish_reason is None for samples in found[2:] for sample in samples)


def test_the_module_does_not_continue() -> None:
    engine = engine_of(stop=STOP_TOKEN_IDS, backend="module")
    with user_error("begun and until need inference weights"):
        engine.generate(PROMPTS, PARAMS, until=range(2))
