"""What a server keeps for connections and bodies that never become requests; tests/serving/test_access.py has those
that do."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import Message

from hybrid_rlhf.serving import web
from hybrid_rlhf.serving.connections import FewLines, LimitedProtocol
from hybrid_rlhf.serving.web import Arriving, limited, served_in_background


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Of a server with four connections and half a second for headers."""
    monkeypatch.setattr(web, "raise_descriptors", lambda: 4)
    monkeypatch.setattr(LimitedProtocol, "header_seconds", 0.5)
    app = FastAPI()

    @app.get("/")
    async def answer() -> str:
        await asyncio.sleep(1.0)  # longer than the headers may take
        return "answered"

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


def test_connections_without_headers_are_few_and_end(address: tuple[str, int]) -> None:
    """A thousand of them took all descriptors of the process for as long as they lasted."""
    host, port = address
    held = [socket.create_connection(address) for _ in range(4)]
    for connection in held:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")
    assert is_closed(socket.create_connection(address)), "a fifth one"
    assert all(map(is_closed, held))
    with httpx2.Client(base_url=f"http://{host}:{port}") as client:
        assert client.get("/").json() == "answered"


def test_headers_of_a_second_request_have_their_time_too(address: tuple[str, int]) -> None:
    connection = socket.create_connection(address)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    connection.settimeout(10)
    text = b""
    while b"answered" not in text:
        text += connection.recv(4096)
    connection.sendall(b"GET / HTTP")
    assert is_closed(connection)


def test_a_flood_writes_few_lines(address: tuple[str, int]) -> None:
    """asyncio wrote a traceback for each connection that found no descriptor: gigabytes in minutes."""
    for name in ("asyncio", "uvicorn.error"):  # of a server that runs
        assert [kind for kind in logging.getLogger(name).filters if isinstance(kind, FewLines)]
    log = logging.Logger("flood")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    few = FewLines()
    log.addFilter(few)
    for number in range(1000):
        log.error("line %d", number)
    assert len(lines) == 60
    few._start -= 61
    log.error("line %d", 1000)
    assert lines[-1] == "line 1000 (940 lines before it were left out)"


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
