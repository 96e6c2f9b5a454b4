"""Adapters and weights that change while requests run: each request keeps its version, and answers name it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI

from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.serving.app import Access, build_app
from hybrid_rlhf.serving.updates import ModelUpdates
from hybrid_rlhf.serving.web import served_in_background
from tests.support.clock import wait_until
from tests.support.errors import user_error
from tests.support.models import random_adapter
from tests.support.services import Server, open_service
from tests.support.tiny import tiny_model, tiny_tokenizer

PROMPT = [7, 8, 9, 30]
TOKENS = 1500


def model(seed: int = 0) -> Any:
    return tiny_model(seed, max_position_embeddings=2000)


def expected(tokens: int, seed: int = 0, adapter: str | None = None) -> list[int]:
    """Greedy tokens of a model alone."""
    adapters = {} if adapter is None else {"a": adapter}
    engine = GenerationEngine.from_model(model(seed), stop_token_ids=[2], adapters=adapters)
    greedy = SamplingParams(max_new_tokens=tokens, temperature=0.0, min_new_tokens=tokens)
    return engine.generate([PROMPT], greedy, adapters=["a"] if adapter else [])[0][0].token_ids


class Changing(Server):
    """A server whose adapters and weights change."""

    def __init__(self, url: str, updates: ModelUpdates, app: FastAPI) -> None:
        super().__init__(url)
        self.updates, self.app = updates, app

    def ask(self, name: str = "m", tokens: int = 20, *, stream: bool = False) -> Any:
        settings = {"max_tokens": tokens, "temperature": 0, "extra_body": {"min_tokens": tokens}}
        answer = self.complete(PROMPT, model=name, stream=stream, **settings)
        return answer if stream else (answer.choices[0].token_ids, answer.system_fingerprint)

    def begin(self, name: str = "m") -> Any:
        """A stream of many tokens that has begun."""
        stream = self.ask(name, TOKENS, stream=True)
        first = next(iter(stream))
        return stream, list(first.choices[0].token_ids), first.system_fingerprint

    def load(self, name: str, path: str) -> httpx2.Response:
        return self.post("/v1/adapters", {"name": name, "path": path})

    def replace_weights(self) -> Future[None]:
        loops: list[asyncio.AbstractEventLoop] = []

        @self.app.get("/loop")
        async def loop() -> None:
            loops.append(asyncio.get_running_loop())

        httpx2.get(f"{self.url}/loop", timeout=60).raise_for_status()
        return asyncio.run_coroutine_threadsafe(self.updates.replace_weights(model(5), "step_9", 9), loops[0])


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[Changing]:
    for seed, name in enumerate(("one", "two", "three")):
        random_adapter(model(), tmp_path / "adapters" / name, seed, "all-linear" if seed else ["q_proj", "down_proj"])
    engine = GenerationEngine.from_model(model(), tokenizer=tiny_tokenizer(), stop_token_ids=[2])
    with open_service(engine, tiny_tokenizer(), max_tokens=1900) as service:
        updates = ModelUpdates(service, engine, service.batch, model, adapters_from=str(tmp_path / "adapters"))
        app = build_app(service, Access(), created=0, updates=updates)
        with served_in_background(app) as url:
            yield Changing(url, updates, app)


@pytest.mark.slow
def test_a_replaced_adapter_is_that_of_later_requests_alone(changing: Changing, tmp_path: Path) -> None:
    """Also one that was unloaded; the memory of a version is given to a later one when no request uses it."""
    folders = {name: str(tmp_path / "adapters" / name) for name in ("one", "two", "three")}
    assert changing.load("poet", "one").json()["version"] == "one@1"
    assert changing.ask("poet") == (expected(20, adapter=folders["one"]), "one@1")
    stream, ids, version = changing.begin("poet")
    assert version == "one@1"
    assert changing.load("poet", "two").json()["parent"] == "m"
    assert changing.ask("poet") == (expected(20, adapter=folders["two"]), "two@2")
    assert changing.ask() == (expected(20), "0")
    assert httpx2.delete(f"{changing.url}/v1/adapters/poet", timeout=60).json()["deleted"] is True
    with pytest.raises(openai.NotFoundError):
        changing.ask("poet")
    for chunk in stream:
        assert chunk.system_fingerprint == "one@1"
        ids += [token for choice in chunk.choices for token in choice.token_ids]
    assert ids == expected(TOKENS, adapter=folders["one"])
    wait_until(lambda: not any(service.running for service in changing.updates._retired.values()))
    changing.load("clerk", "three")
    assert changing.ask("clerk")[0] == expected(20, adapter=folders["three"])
    assert len(changing.updates._engine.adapters) <= 2, "numbers are used again"
    assert {entry.id for entry in changing.client.models.list()} == {"m", "clerk"}


def test_a_response_has_the_version(changing: Changing) -> None:
    """The Responses API too: of the model, and of an adapter that was replaced; whole, and in each event."""
    asked: dict[str, Any] = {"input": "hello", "max_output_tokens": 5}
    assert changing.client.responses.create(model="m", **asked).system_fingerprint == "0"
    for path, version in (("one", "one@1"), ("two", "two@2")):
        changing.load("poet", path)
        assert changing.client.responses.create(model="poet", **asked).system_fingerprint == version
        events = list(changing.client.responses.create(model="poet", stream=True, **asked))
        versions = [event.response.system_fingerprint for event in events if hasattr(event, "response")]
        assert versions == [version] * 3, "created, in progress, incomplete"


def test_weights_change_between_requests(changing: Changing, tmp_path: Path) -> None:
    """Running ones finish with their weights; one that arrives meanwhile waits for the new ones. Adapters are kept,
    over the new weights."""
    old = expected(TOKENS)  # before: a request without a seed draws from the generator that makes models
    new = expected(20, seed=5)
    adapted = expected(20, seed=5, adapter=str(tmp_path / "adapters" / "two"))
    changing.load("poet", "two")
    assert changing.ask() == (old[:20], "0")
    stream, ids, _ = changing.begin()
    with changing.updates._service.batch.paused():  # else it may have ended before
        replaced = changing.replace_weights()
        wait_until(lambda: not changing.updates._service.admits.is_set())
    thread = ThreadPoolExecutor(1)
    asking = thread.submit(changing.ask)
    for chunk in stream:
        assert chunk.system_fingerprint == "0"
        ids += [token for choice in chunk.choices for token in choice.token_ids]
    assert ids == old
    replaced.result(timeout=60)
    assert asking.result() == (new, "step_9")
    assert changing.ask("poet")[0] == adapted
    assert changing.client.models.retrieve("m").version == "step_9"


def test_only_adapters_of_the_folder_are_loaded(changing: Changing, tmp_path: Path) -> None:
    random_adapter(model(), tmp_path / "outside", 0, "all-linear")
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    for path in ("../one", "/etc", ".", "nothing", "one/../../..", "link", "a\0b"):
        answer = changing.load("poet", path)
        assert answer.status_code == 400, answer.text
        assert str(tmp_path) not in answer.text
    assert changing.ask()[0] == expected(20)
    assert changing.load("m", "one").status_code == 400
    for name in ("../z", "a/./b", ".."):  # clients normalise the URL that unloads it
        assert "no part . or .." in changing.load(name, "one").text
    assert httpx2.delete(f"{changing.url}/v1/adapters/poet").status_code == 404


def test_a_server_that_loads_adapters_needs_a_key() -> None:
    with user_error("adapters_from needs an api_key"):
        ServeConfig(path="m", adapters_from="adapters")
