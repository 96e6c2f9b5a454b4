"""Which pages, hosts and content types a server without a key refuses, what it never repeats, and who is allowed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from hybrid_rlhf.cli.saved_models.loading import load_engine
from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.serving.admission import Activity, KeyAdmission
from hybrid_rlhf.serving.app import Access
from hybrid_rlhf.serving.bodies import RewardBody, read_body
from hybrid_rlhf.serving.episodes import EpisodeQueue
from hybrid_rlhf.serving.metrics import Metrics
from hybrid_rlhf.serving.service import Service, UnknownEpisode
from hybrid_rlhf.serving.web import (
    CLIENT_CLOSED,
    AccessRules,
    FiniteJSON,
    add_error_answers,
)
from tests.support.errors import user_error
from tests.support.services import JSON, open_service, served_service

PAGE = "https://app.example"
COMPLETE = "/v1/completions"


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *((name, True) for name in ("127.0.0.1", "LOCALHOST:99", "[::1]:7", socket.gethostname(), "my.name:8000")),
        *((name, False) for name in ("", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::1]evil.com:80")),
        *((name, False) for name in ("[evil.com]", "[localhost]", "[127.0.0.1]", "127.0.0.1:80:evil", "[]", "::1")),
        *((name, False) for name in ("127.0.0.1@evil.example", "localhost:", "localhost:1234567", ":80", "[::1")),
    ],
)
def test_a_host_is_an_address_or_a_name_of_this_machine(host: str, is_own: bool) -> None:
    """`[::1]evil.com` was taken for an address."""
    with contextlib.nullcontext() if is_own else pytest.raises(HTTPException):
        AccessRules("my.name").require_host(Headers({"host": host}))


@pytest.fixture(scope="module")
def service(model_folder: Path) -> Iterator[Service]:
    engine, tokenizer = load_engine(ServeConfig(path=str(model_folder)))
    with open_service(engine, tokenizer, max_tokens=100, name="tiny", max_new_tokens=2) as opened:
        yield opened


BODY = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "judge.internal:8000"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "OWN"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
@pytest.mark.parametrize("key", [None, "a-key"])
def test_a_page_of_another_site_completes_nothing(
    service: Service, headers: dict[str, str], status: int, key: str | None
) -> None:
    """A page could end a server without a key by one request, which needs no preflight as text/plain. A key is proof
    enough of the host, whatever name a proxy gives. Nor does a page take an episode.
    """
    status = 200 if key and "Host" in headers else status
    with served_service(service, Access(api_key=key), queue=EpisodeQueue()) as url:
        headers = {name: value.replace("OWN", url) for name, value in headers.items()}
        given = {**JSON, **headers, "Authorization": f"Bearer {key}"}
        answer = httpx2.post(f"{url}{COMPLETE}", headers=given, content=BODY, timeout=60)
        assert answer.status_code == status, answer.text
        assert "access-control-allow-origin" not in answer.headers
        if status != 200:
            assert answer.json()["error"]["message"]
            assert httpx2.post(f"{url}/episodes", headers=given, content=b"{}").status_code == status
        if "Host" in headers:
            assert httpx2.get(f"{url}/metrics", headers=headers).status_code == status


def test_an_allowed_page_asks_as_browsers_do(service: Service) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}

    def preflight(url: str, origin: str) -> httpx2.Response:
        return httpx2.options(f"{url}{COMPLETE}", headers={"Origin": origin, **asked}, timeout=60)

    def complete(url: str, origin: str, key: str = "a-key") -> httpx2.Response:
        headers = {"Origin": origin, "Authorization": f"Bearer {key}", **JSON}
        return httpx2.post(f"{url}{COMPLETE}", headers=headers, content=BODY, timeout=60)

    with served_service(service, Access(api_key="a-key", origins=[PAGE])) as url:
        allowed = preflight(url, PAGE)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        for key, status in (("a-key", 200), ("wrong", 401)):
            answer = complete(url, PAGE, key)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        for origin in ("http://app.example", "https://app.example.evil.com"):
            for answer, status in ((preflight(url, origin), 400), (complete(url, origin), 403)):
                assert answer.status_code == status and "access-control-allow-origin" not in answer.headers
    with served_service(service, Access(api_key="a-key")) as url:
        assert preflight(url, PAGE).status_code == 403


@pytest.mark.parametrize("origin", ["*", "https://app.example/", "https://a b"])
def test_origins_are_written_out(origin: str) -> None:
    with user_error("cors_origins must be SCHEME://HOST or SCHEME://HOST:PORT each"):
        ServeConfig(path="x", cors_origins=[origin])


def test_addresses_of_an_episode_are_those_of_the_server(service: Service) -> None:
    """They repeated the Host header, by which a page or proxy could send programs elsewhere."""
    queue = EpisodeQueue()
    queue._rewards["name"] = Future()
    queue._waiting.append(("name", {"model": "actor", "row": {}, "options": {}}))
    with served_service(service, queue=queue) as url:
        port = url.rpartition(":")[2]
        told = httpx2.post(f"{url}/episodes", json={}, headers={"Host": f"localhost:{int(port) - 1}"}).json()
    assert told["base_url"] == f"{url}/episodes/name/v1" and told["reward_url"] == f"{url}/episodes/name/reward"


def test_an_episode_that_has_ended_is_offered_to_nobody() -> None:
    """Programs played those that had timed out, and the server kept each one's report."""
    queue = EpisodeQueue()

    async def play() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.play("late", {}, lambda: None), 0.01)
        playing = asyncio.create_task(queue.play("next", {}, lambda: None))
        await asyncio.sleep(0)
        assert queue.take() == ("next", {}) and queue.take() is None
        queue.report("next", 1.0)
        assert await playing == 1.0

    asyncio.run(play())
    for name in ("late", "next"):
        with pytest.raises(UnknownEpisode):
            queue.report(name, 1.0)
    assert not queue._rewards


@pytest.mark.parametrize("reward", ["1.1e6", "-1e7", "Infinity", "NaN", "1e999", "true", '"1"', f"1{'0' * 400}"])
def test_rewards_are_finite_and_bounded(reward: str) -> None:
    with user_error("reward must"):
        read_body(RewardBody, f'{{"reward": {reward}}}'.encode())


def test_a_client_that_leaves_within_its_body_is_no_error() -> None:
    """Each was a traceback in the log."""
    app = FastAPI()
    add_error_answers(app, {}, lambda status, text, error: Response(status_code=status), internal="failed")
    sent: list[Any] = []

    @app.post("/")
    async def read(request: Request) -> None:
        await request.body()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}, receive, send))
    assert sent[0]["status"] == CLIENT_CLOSED


def test_the_body_of_a_refused_request_is_not_read() -> None:
    """Reading it takes as long as for one that has a key."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def check() -> None:
        app = FastAPI()
        rules, activity = AccessRules("127.0.0.1"), Activity()
        admission = KeyAdmission(
            app, api_key="k", requests=Metrics("a").requests, rules=rules, activity=activity, max_body_bytes=9
        )
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": [(b"host", b"127.0.0.1")]}
        await admission(scope, lambda: pytest.fail("read"), send)

    asyncio.run(check())
    assert sent[0]["status"] == 401 and (b"connection", b"close") in sent[0]["headers"]


def test_an_answer_has_only_numbers_of_json() -> None:
    """A value or a log-prob may be NaN or infinite; a client's parser refuses those words."""
    content = {"a": [1.5, float("nan")], "b": (float("inf"), {"c": -float("inf")}), "d": "NaN"}
    expected = {"a": [1.5, None], "b": [None, {"c": None}], "d": "NaN"}
    assert json.loads(FiniteJSON(content).body, parse_constant=pytest.fail) == expected
