"""What a server keeps for connections and bodies that never become requests; tests/serving/test_access.py has those
that do."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.types import Message

from hybrid_rlhf.serving import connections, web
from hybrid_rlhf.serving.connections import FewLines, LimitedProtocol
from hybrid_rlhf.serving.web import Arriving, limited, served_in_background
from tests.support.clock import ManualClock, wait_until

HELD: list[str] = []
"""Requests that are answered when a test clears the list."""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Of a server with four connections and a second for headers."""
    monkeypatch.setattr(web, "connections_that_fit", lambda: 4)
    monkeypatch.setattr(LimitedProtocol, "header_seconds", 1.0)
    app = FastAPI()

    @app.get("/")
    async def answer() -> str:
        await asyncio.sleep(1.5)  # longer than the headers may take
        return "answered"

    @app.get("/held")
    async def hold() -> str:
        HELD.append("request")
        while HELD:
            await asyncio.sleep(0.01)
        return "answered"

    @app.post("/")
    async def take(request: Request) -> bytes:
        return await request.body()

    with served_in_background(app) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        yield host, int(port)


def is_closed(connection: socket.socket) -> bool:
    """True when the server has closed it."""
    connection.settimeout(10)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def is_open(connection: socket.socket) -> bool:
    """True while the server neither closes it nor sends anything."""
    connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.recv(1)
    return True


@pytest.mark.parametrize(
    "part",
    [b"", b"GET / HTTP/1.1\r\nX-A: ", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx"],
    ids=["nothing", "headers", "a body"],
)
def test_whole_requests_have_the_place_of_those_that_are_not(
    address: tuple[str, int], part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that wait held up all others until their time was over, and then the next ones."""
    monkeypatch.setattr(LimitedProtocol, "header_seconds", 60.0)
    host, port = address
    held = [socket.create_connection(address) for _ in range(4)]
    for connection in held:
        connection.sendall(part)
    with httpx2.Client(base_url=f"http://{host}:{port}") as client:
        assert client.get("/").json() == "answered"
    assert is_closed(held[0]) and is_open(held[3])


def test_a_connection_that_has_asked_before_stays(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest connection may be that of a client that asks again and again."""
    monkeypatch.setattr(LimitedProtocol, "header_seconds", 60.0)
    host, port = address
    with httpx2.Client(base_url=f"http://{host}:{port}") as client:

        def address_of_client() -> object:
            return client.get("/").extensions["network_stream"].get_extra_info("client_addr")

        first = address_of_client()
        held = [socket.create_connection(address) for _ in range(3)]
        assert address_of_client() == first
        held += [socket.create_connection(address) for _ in range(2)]
        assert all(map(is_closed, held[:2]))
        assert address_of_client() == first and is_open(held[2])


def test_requests_that_are_answered_keep_their_place(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "header_seconds", 60.0)
    HELD.clear()
    held = [socket.create_connection(address) for _ in range(4)]
    for connection in held:
        connection.sendall(b"GET /held HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    wait_until(lambda: len(HELD) == 4)
    assert is_closed(socket.create_connection(address))
    HELD.clear()
    for connection in held:
        connection.settimeout(10)
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_connections_without_headers_end(address: tuple[str, int]) -> None:
    """A thousand of them took all descriptors of the process for as long as they lasted. Headers of a second request
    have their time too."""
    silent = socket.create_connection(address)
    connection = socket.create_connection(address)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    connection.settimeout(10)
    text = b""
    while b"answered" not in text:
        text += connection.recv(4096)
    connection.sendall(b"GET / HTTP")
    assert is_closed(connection) and is_closed(silent)


def test_a_flood_writes_few_lines(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio wrote a traceback for each connection that found no descriptor: gigabytes in minutes."""
    for name in ("asyncio", "uvicorn.error"):  # of a server that runs
        assert [kind for kind in logging.getLogger(name).filters if isinstance(kind, FewLines)]
    clock = ManualClock()
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=clock))
    log = logging.Logger("flood")
    written = io.StringIO()
    log.addHandler(logging.StreamHandler(written))
    log.addFilter(FewLines())
    try:
        raise ValueError("x" * 10**5)
    except ValueError:
        for number in range(3600):
            clock.seconds += 1
            for _ in range(3):
                log.exception("request %d %s", number, "y" * 10**5)
    lines = written.getvalue()
    assert lines.count("request ") <= 60 + 60 and "(179 lines before it were left out)" in lines
    assert len(lines) < 2**20, "ten megabytes are the lines of half a day"


def _receive(*messages: Message) -> Any:
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.sleep(60)
        return left.pop(0)

    return receive


def _part(size: int, *, more: bool) -> Message:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


def test_bodies_that_arrive_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many bodies without their last byte were in memory, and in no quota."""

    async def check() -> None:
        arriving = Arriving(10)
        with limited(_receive(_part(6, more=True)), 8, arriving) as first:
            await first()
            with limited(_receive(_part(6, more=True)), 8, arriving) as second:
                with pytest.raises(HTTPException) as full:
                    await second()
            assert full.value.status_code == 429
        with limited(_receive(_part(6, more=False), {"type": "http.disconnect"}), 8, arriving) as third:
            await third()
            assert (await third())["type"] == "http.disconnect"
        assert arriving.size == 0
        monkeypatch.setattr(web, "BODY_SECONDS", 0.05)
        with limited(_receive(_part(1, more=True)), 8, arriving) as slow:
            await slow()
            with pytest.raises(HTTPException) as late:
                await slow()
        assert late.value.status_code == 408 and arriving.size == 0

    asyncio.run(check())
