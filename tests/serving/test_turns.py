"""Turns of requests in the batch of `serve`; tests/serving/test_server.py compares their tokens with the engine's."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.open_batch import PromptBatch, StreamedToken
from hybrid_rlhf.serving.turns import Turns
from tests.support.clock import wait_until
from tests.support.services import Server, open_service, served_service
from tests.support.tiny import tiny_model, tiny_tokenizer


class Rows:
    """A batch of four rows, whose samples a test ends."""

    rows = 4
    unfinished = 0
    failure = None

    def __init__(self) -> None:
        self.parts: list[tuple[Any, Any, Any]] = []
        self.cancelled: list[Any] = []

    def submit(self, batch: PromptBatch, deliver: Any) -> Any:
        part = SimpleNamespace(error=None)
        self.parts.append((part, batch, deliver))
        return part

    def cancel(self, part: Any) -> None:
        self.cancelled.append(part)

    def entered(self) -> list[tuple[int, int, int]]:
        """Token, first sample and number of samples of each part since the last call."""
        parts, self.parts = self.parts, []
        self.ends = [deliver for _, _, deliver in parts]
        return [(batch.prompts[0][0], batch.first_sample, batch.sampling[0].n) for _, batch, _ in parts]  # type: ignore[index]


def last(sample: int = 0) -> list[StreamedToken]:
    return [StreamedToken(0, sample, 1, 0.0, 0.0, "length")]


def request(token: int, samples: int = 1, prompts: int = 1) -> PromptBatch:
    return PromptBatch([[token]] * prompts, SamplingParams(n=samples, seed=1, max_new_tokens=4))


def test_a_request_of_many_samples_leaves_a_row_and_waits_for_others() -> None:
    rows = Rows()
    turns = Turns(rows)  # type: ignore[arg-type]
    got: list[Any] = []
    turns.submit(request(7, 10), got.append)
    assert rows.entered() == [(7, 0, 3)] and turns.unfinished == 7
    (end_of_long,) = rows.ends
    turns.submit(request(8), got.append)
    assert rows.entered() == [(8, 0, 1)]
    (end_of_short,) = rows.ends
    turns.submit(request(9, 1, prompts=2), got.append)
    assert rows.entered() == [], "all rows are taken"
    end_of_long(last())
    assert rows.entered() == [(9, 0, 1)], "the request that has none"
    end_of_short(last())
    assert rows.entered() == []
    end_of_long(last(1))
    assert rows.entered() == [(7, 3, 1)], "both have one, this one came first"
    end_of_long(last(2))
    assert rows.entered() == [(7, 4, 1)] and turns.unfinished == 6
    (end_of_fifth,) = rows.ends
    turns.submit(request(6), got.append)
    assert rows.entered() == [(6, 0, 1)], "the row that is left"
    end_of_fifth(last(4))
    assert got[-1][0].sample == 4 and rows.entered() == []


def test_what_ends_gives_its_rows_to_others() -> None:
    """A client that leaves, and a part that fails."""
    rows = Rows()
    turns = Turns(rows)  # type: ignore[arg-type]
    got: list[Any] = []
    left = turns.submit(request(7, 10), pytest.fail)
    failing = turns.submit(request(8, 10), got.append)
    assert rows.entered() == [(7, 0, 3), (8, 0, 1)]
    (_, end_of_failing) = rows.ends
    turns.cancel(left)
    turns.cancel(left)
    assert len(rows.cancelled) == 1 and rows.entered() == [(8, 1, 2)]
    failing.parts[1].error = ValueError("odd")  # type: ignore[misc]
    end_of_failing([])
    assert got == [[]] and failing.error is not None and turns.unfinished == 0
    turns.submit(request(9, 10), got.append)
    assert rows.entered() == [(9, 0, 3)], "all rows are free"


def test_a_batch_that_has_ended_ends_requests_that_wait() -> None:
    rows = Rows()
    turns = Turns(rows)  # type: ignore[arg-type]
    got: list[Any] = []
    turns.submit(request(7, 3), got.append)
    turns.submit(request(8, 3), got.append)
    first, second = (rows.parts[place][2] for place in range(2))
    rows.submit = Mock(side_effect=RuntimeError("closed"))  # type: ignore[method-assign]
    first([])
    second([])
    assert got == [[], []] and turns.unfinished == 0


def test_a_short_request_does_not_wait_for_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 128 completions took all rows until its end; the tokens of all are those of the engine."""
    engine = GenerationEngine.from_model(tiny_model(), tokenizer=tiny_tokenizer(), stop_token_ids=[2])
    params = {"seed": 5, "max_tokens": 60}
    with open_service(engine, tiny_tokenizer(), max_tokens=100, max_new_tokens=60) as service:
        with served_service(service) as url, ThreadPoolExecutor(1) as threads:
            server = Server(url)
            wanted = engine.generate([[75, 76], [77]], SamplingParams(n=10, seed=5, max_new_tokens=60))
            deliver = service.batch._deliver
            monkeypatch.setattr(service.batch, "_deliver", lambda new: (time.sleep(0.005), deliver(new)))
            long = threads.submit(server.complete, [[75, 76], [77]], n=10, **params)
            wait_until(lambda: service.batch.load.rows >= 3, "its first samples")
            server.complete("a", max_tokens=1)
            assert service.turns.unfinished > 4, "most of it is left"
            found = [choice.token_ids for choice in long.result().choices]
    assert found == [completion.token_ids for completions in wanted for completion in completions]
