"""Completions of vLLM servers: equal to the engine's, balanced, repeated where a server is lost."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.backends.vllm import VLLMBackend, VLLMServer
from hybrid_rlhf.generation.open_batch import PromptBatch
from tests.support.clock import wait_until
from tests.support.errors import user_error
from tests.support.generation import completed, ids_of
from tests.support.tiny import VOCABULARY, tiny_tokenizer
from tests.support.vllm_server import FakeVLLM, fake_vllm

PROMPTS = [[5, 6, 7], [9, 8], [4, 4, 4, 4]]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=8, temperature=0.7, n=3, seed=4)


def refuse() -> None:
    raise UserError("all servers are lost")


def engine_of(
    *fakes: FakeVLLM, revive: Callable[[], None] = refuse, stop: tuple[int, ...] = (), **settings: Any
) -> GenerationEngine:
    """An engine over servers with the label of their weights."""
    servers = [VLLMServer(fake.url, fake.url) for fake in fakes]
    for server in servers:
        server.introduce()
    backend = VLLMBackend(servers, vocab_size=VOCABULARY, revive=revive, **settings)
    backend.weight_label = "default"
    return GenerationEngine(backend, stop_token_ids=stop, tokenizer=tiny_tokenizer())


def test_completions_are_those_of_the_model(model_folder: Path) -> None:
    """Greedy tokens, log-probs, stop tokens and lengths as by the engine itself; samples by their seeds."""
    own = GenerationEngine.from_pretrained(str(model_folder), dtype=torch.float32)
    own.maker.stop_token_ids = frozenset()
    (first,) = own.generate(PROMPTS[:1], GREEDY)[0]
    stop = (first.token_ids[3],)
    own.maker.stop_token_ids = frozenset(stop)
    with fake_vllm(model_folder) as fake:
        engine = engine_of(fake, stop=stop)
        for mine, theirs in zip(own.generate(PROMPTS, GREEDY), engine.generate(PROMPTS, GREEDY), strict=True):
            assert mine[0].token_ids == theirs[0].token_ids and mine[0].finish_reason == theirs[0].finish_reason
            assert mine[0].logprobs == pytest.approx(theirs[0].logprobs, abs=1e-5)
            assert theirs[0].weight_versions == [0] * len(theirs[0].token_ids)
        samples, again = (engine.generate(PROMPTS, SAMPLED) for _ in range(2))
        assert samples == again
        assert len({tuple(completion.token_ids) for completion in samples[0]}) == 3, "each sample has its own seed"
        (body, *_) = fake.bodies
        assert body["ignore_eos"] and body["stop_token_ids"] == [*stop] and body["logprobs"] == 0


def test_a_shorter_context_of_the_server_limits_completions(model_folder: Path) -> None:
    with fake_vllm(model_folder, max_model_len=6) as fake:
        ((completion,),) = engine_of(fake).generate(PROMPTS[:1], GREEDY)
    assert len(completion.token_ids) == 3 and completion.finish_reason == "length"


def test_servers_share_the_requests_up_to_a_limit(model_folder: Path) -> None:
    with fake_vllm(model_folder, delay_seconds=0.02) as one, fake_vllm(model_folder, delay_seconds=0.02) as other:
        engine_of(one, other, requests_per_server=2).generate(PROMPTS * 4, SAMPLED)
    assert len(one.bodies) + len(other.bodies) == 36
    assert min(len(one.bodies), len(other.bodies)) >= 9
    assert one.most_at_once == other.most_at_once == 2


@pytest.mark.parametrize("failure", ["hangs up", "fails", "aborts"])
def test_requests_of_a_lost_server_are_repeated_at_another(model_folder: Path, failure: str) -> None:
    """With the same samples as without the loss."""
    answers = {
        "hangs up": (0, None),
        "fails": (500, {"error": {"message": "EngineDeadError"}}),
        "aborts": (200, {"choices": [{"token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": "abort"}]}),
    }
    with fake_vllm(model_folder) as alone:
        expected = engine_of(alone).generate(PROMPTS, SAMPLED)
    with fake_vllm(model_folder) as one, fake_vllm(model_folder) as other:
        # each server is sent two requests at once, more only as it answers
        one.intercept = lambda body: answers[failure] if len(one.bodies) > 1 else None
        engine = engine_of(one, other, requests_per_server=2)
        assert engine.generate(PROMPTS, SAMPLED) == expected
        lost, kept = engine.backend.servers
        assert lost.lost is not None and kept.lost is None
        sent = len(one.bodies)
        engine.generate(PROMPTS, SAMPLED)
        assert len(one.bodies) == sent, "a lost server is used no more"


def test_without_a_server_the_owner_is_asked_for_one(model_folder: Path) -> None:
    """Once, while all requests wait; an error of its ends the call."""
    revived = []
    with fake_vllm(model_folder) as fake:
        fake.intercept = lambda body: None if revived else (503, {})

        def revive() -> None:
            revived.append("server")
            engine.backend.servers[0].lost = None

        engine = engine_of(fake, revive=revive)
        assert len(engine.generate(PROMPTS, SAMPLED)) == 3 and revived == ["server"]
        fake.intercept = lambda body: (503, {})
        with user_error("all servers are lost"):
            engine_of(fake).generate(PROMPTS, SAMPLED)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"error": {"message": "top_p is wrong"}}), "answered HTTP 400"),
        ((200, {"choices": [{"text": "a", "finish_reason": "stop"}]}), "must return token_ids and logprobs"),
    ],
)
def test_a_wrong_answer_ends_the_call(model_folder: Path, answer: tuple[int, Any], message: str) -> None:
    with fake_vllm(model_folder, intercept=lambda body: answer) as fake:
        with user_error(message):
            engine_of(fake).generate(PROMPTS[:1], GREEDY)
        assert len(fake.bodies) == 1, "it would be refused again"


def test_a_server_that_restarted_during_a_rollout_is_refused(model_folder: Path) -> None:
    with fake_vllm(model_folder) as fake:
        engine = engine_of(fake)
        fake.label = "of its start"
        with user_error("has weight_version of its start in place of default"):
            engine.generate(PROMPTS, GREEDY)


def test_an_open_batch_completes_requests_as_they_arrive(model_folder: Path) -> None:
    with fake_vllm(model_folder) as fake:
        engine = engine_of(fake)
        expected = engine.generate(PROMPTS[:1], GREEDY)[0][0].token_ids
        with engine.open(rows=4, max_tokens=64) as batch:
            assert ids_of(completed(batch, PROMPTS[:1], GREEDY)) == [[expected]]
            batch.cancel(batch.submit(PromptBatch(PROMPTS[1:2], GREEDY), lambda new: None))
            assert ids_of(completed(batch, PROMPTS[:1], GREEDY)) == [[expected]]


def test_a_paused_batch_goes_on_from_its_tokens(model_folder: Path) -> None:
    """Requests at servers, beyond their limit and lost in the pause; tokens have the version of their weights."""
    own = GenerationEngine.from_pretrained(str(model_folder), dtype=torch.float32)
    own.maker.stop_token_ids = frozenset()
    greedy = SamplingParams(max_new_tokens=20, temperature=0.0)
    expected = [completion.token_ids for (completion,) in own.generate(PROMPTS, greedy)]
    with fake_vllm(model_folder, token_seconds=0.5) as fake, fake_vllm(model_folder, token_seconds=0.5) as lost:
        engine = engine_of(fake, lost, requests_per_server=1)
        completions = {}
        done = threading.Event()

        def deliver(new: list[Any]) -> None:
            for token in new:
                if token.completion is not None:
                    completions[token.prompt] = token.completion
            if not new or len(completions) == len(PROMPTS):
                done.set()

        with engine.open(rows=4, max_tokens=64) as batch:
            submission = batch.submit(PromptBatch(PROMPTS, greedy), deliver)
            wait_until(lambda: len(fake.bodies) == len(lost.bodies) == 1)
            wait_until(lambda: min(fake.tokens, lost.tokens) >= 2)
            lost.intercept = lambda body: (0, None)  # hangs up from now on
            with batch.paused():
                so_far = [len(batch.completions(submission)[place, 0].token_ids) for place in range(len(PROMPTS))]
                assert len(fake.bodies) == 1, "nothing is sent meanwhile"
                fake.token_seconds = lost.token_seconds = 0.0
                batch.renew(7, recompute=True)
            assert done.wait(60)
        assert fake.calls.count("/pause") == fake.calls.count("/resume") == 1
        assert any(body["prompt"][: len(PROMPTS[0])] == PROMPTS[0] for body in fake.bodies[1:])
    assert 0 < so_far[0] < 20 and so_far[2] == 0, "two ran, the third waited"
    assert [completions[place].token_ids for place in range(len(PROMPTS))] == expected
    for place, count in enumerate(so_far):
        assert completions[place].weight_versions == [0] * count + [7] * (20 - count)


def test_a_closed_engine_stops_while_it_waits(model_folder: Path) -> None:
    with fake_vllm(model_folder) as fake:
        engine = engine_of(fake)
        ended = threading.Event()

        def close(body: dict[str, Any]) -> tuple[int, None]:
            engine.close()
            assert ended.wait(60)
            return 0, None  # it hangs up: to load its model would take its time beside the next test

        fake.intercept = close
        with pytest.raises(RuntimeError, match="closed while it generated"):
            engine.generate(PROMPTS[:1], GREEDY)
        ended.set()


def test_certificates_are_read_once(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each call, they took longer than the call: 256 rows of a served teacher 16 seconds."""
    create = Mock(wraps=ssl.create_default_context)
    monkeypatch.setattr(ssl, "create_default_context", create)
    with fake_vllm(model_folder) as fake:
        server = VLLMServer(fake.url, "fake")
        for _ in range(3):
            server.introduce()
        engine_of(fake).generate(PROMPTS[:1], GREEDY)
    assert create.call_count <= 1


def test_another_kind_of_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page in place of JSON ended a run with a traceback."""
    server = VLLMServer("http://other", "http://other")
    with user_error(r"http://other must have vLLM's route /v1/models, .* HTTP 200 \(<html>"):
        server.content(httpx2.Response(200, text="<html>"), "/v1/models")
    with user_error(r"http://other must accept what /v1/completions is asked, .* HTTP 400 \(too long\): change"):
        server.content(httpx2.Response(400, text="too long"), "/v1/completions")
    for answer in ({"error": "busy"}, {"choices": [{}]}, {"choices": [{"prompt_logprobs": [None, None]}]}, None):
        monkeypatch.setattr(VLLMServer, "call", lambda *_, answer=answer, **__: answer)
        with user_error("must be servers with prompt_logprobs, http://other has none"):
            server.prompt_logprobs([5, 6])
    monkeypatch.setattr(VLLMServer, "call", lambda *_: {"detail": "none"})
    with user_error("must be a vLLM server, its /v1/models has no model"):
        server.introduce()
