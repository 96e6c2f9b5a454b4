"""The parts that all servers share: `serve`, the endpoint of a run and the board.

A page of another origin in the same browser can send requests to 127.0.0.1, and if an attacker's DNS resolves its name
to 127.0.0.1, it even has the same origin. So the Host must be an address or a name of this machine; an Origin, which
only browsers send, must be the server's or an allowed one; and a POST needs a content type that no form or image can
send.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.connections import BACKLOG, connections_that_fit, limit_lines, limited_protocol

ResultT = TypeVar("ResultT")
CLIENT_CLOSED = 499
"""Status to count for a client that has disconnected, which receives no status."""
_MOST_VALUES = 2**20
"""Largest number of values in a body: parsing more blocks the interpreter for too long, on any thread."""
_MOST_LEVELS = 256
_MARKS = b'",[]{}'
_OTHERS = bytes({*range(256)} - {*_MARKS})
_LEVELS = np.array([(byte in b"[{") - (byte in b"]}") for byte in range(256)], np.int8)
"""What a byte outside of text adds to the depth."""
_BEGINS = np.frombuffer(b",[{", np.uint8)
_WAITING = 1024
"""Connections that the kernel keeps for the loop; where there are more, a client tries again after a second."""
_LARGE_BYTES = 2**20
_READING_LARGE = ThreadPoolExecutor(1, "large-bodies")
BODY_SECONDS = 300.0
"""Time for the body of a request to arrive."""
_HOST = re.compile(r"(?:\[(?P<address>[^\[\]]*)\]|(?P<name>[^\[\]:]*))(?::\d{1,5})?")


class AccessRules:
    """The rules of one server."""

    def __init__(self, host: str, origins: Collection[str] = ()) -> None:
        """Take the configured host, and the origins of other sites whose pages may send requests."""
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._origins = frozenset(origins)

    def require_host(self, headers: Headers) -> None:
        """Raise HTTPException unless the Host is an address, which needs no DNS, or a name of this machine."""
        host = headers.get("host", "")
        if not self._is_own(host):
            raise HTTPException(
                403, f"Host must be an address or a name of this machine, got {host[:100]!r}: ask it by that"
            )

    def require_origin(self, headers: Headers) -> None:
        """Raise HTTPException for an Origin that is neither the server's nor an allowed one."""
        origin = headers.get("origin")
        host = headers.get("host")
        if origin is not None and origin not in {*self._origins, f"http://{host}", f"https://{host}"}:
            raise HTTPException(
                403,
                "Origin must be that of the server or an allowed one (--cors_origins of serve), got "
                f"{origin[:100]!r}: ask from one of them",
            )

    def require_json(self, method: str, headers: Headers) -> None:
        """Raise HTTPException for a body that is not JSON by its content type."""
        content_type = headers.get("content-type", "")
        if method == "POST" and content_type.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(
                415, f"a POST needs Content-Type: application/json, got {content_type[:100]!r}: send it"
            )

    def _is_own(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        try:
            ipaddress.ip_address(match["address"] or match["name"] or "")
        except ValueError:
            return match["name"] is not None and match["name"].lower() in self._names
        return match["address"] is None or ":" in match["address"]


class Arriving:
    """A sender's requests that are not answered yet, and the bytes of their bodies so far; those that are not complete
    are in memory too."""

    def __init__(self, most: int) -> None:
        """Take the largest number of bytes."""
        self.most = most
        self.size = 0
        self.requests = 0

    def add(self, size: int) -> None:
        """Count bytes, or fewer.

        Raises:
            HTTPException: when there are too many.
        """
        if size > 0 and self.size + size > self.most:
            raise HTTPException(
                429,
                f"bodies that arrive have at most {self.most} bytes together: send it again later",
                {"Connection": "close"},  # the rest of it is not read
            )
        self.size += size


@contextlib.contextmanager
def limited(receive: Receive, most: int, arriving: Arriving) -> Iterator[Receive]:
    """Context with a channel of a request that raises HTTPException when the body has more bytes, when all that arrive
    have too many, or when it has not arrived in time."""
    size = 0
    is_whole = False
    end = time.monotonic() + BODY_SECONDS

    async def counted() -> Message:
        nonlocal size, is_whole
        if is_whole:
            return await receive()  # what comes then is that the client disconnects
        try:
            message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
        except TimeoutError:
            raise HTTPException(408, f"a body arrives within {BODY_SECONDS:.0f} s: send it again") from None
        received = len(message.get("body", b""))
        require_size(size + received, most)
        arriving.add(received)
        size += received
        is_whole = not message.get("more_body", False)
        return message

    arriving.requests += 1
    try:
        yield counted
    finally:
        arriving.requests -= 1
        arriving.add(-size)


async def beside(request: Request, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """The result of what reads a body, which another thread than the event loop's calls; large bodies are read one
    after another, so that small ones find a thread."""
    pool = _READING_LARGE if len(await request.body()) > _LARGE_BYTES else None
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


def require_size(size: int, most: int) -> None:
    """Raise HTTPException for a body that is too large."""
    if size > most:
        raise HTTPException(413, f"a body has at most {most} bytes: shorten it")


def require_bounded_json(content: bytes) -> None:
    """Raise UserError for JSON with more values than the interpreter may be blocked for, or more levels, before it is
    parsed."""
    marks = content.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
    if len(marks) > 8 * _MOST_VALUES:  # more than JSON of so many values has, unless its texts have many of them
        raise _too_many(f"more than {_MOST_VALUES}")
    read = np.frombuffer(marks, np.uint8)
    is_value = ~np.logical_xor.accumulate(read == ord('"'))  # outside of texts, with the ends of these
    values = np.count_nonzero(is_value & np.isin(read, _BEGINS))
    if values > _MOST_VALUES:
        raise _too_many(str(values))
    levels = np.cumsum(_LEVELS[read] * is_value, dtype=np.int32).max(initial=0)
    if levels > _MOST_LEVELS:
        raise UserError(f"a body must have at most {_MOST_LEVELS} levels, got {levels}: flatten it")


def _too_many(count: str) -> UserError:
    return UserError(
        f"a body must have at most {_MOST_VALUES} values, counted by commas and opening brackets, got {count}: send "
        "several requests"
    )


class FiniteJSON(JSONResponse):
    """An answer in JSON; NaN and infinity, which JSON does not have, are null."""

    def render(self, content: Any) -> bytes:
        """The bytes of a content."""
        return json_text(content, ensure_ascii=False, separators=(",", ":")).encode()


def json_text(content: Any, **settings: Any) -> str:
    """JSON of a content, in which NaN and infinity are null; settings as of `json.dumps`."""
    try:
        return json.dumps(content, allow_nan=False, **settings)
    except ValueError:
        return json.dumps(_finite(content), allow_nan=False, **settings)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class KnownKeys(BaseModel):
    """A query that has only the keys of its class."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StrictBody(KnownKeys):
    """A body whose values also have the types of its keys; nothing is converted."""

    model_config = ConfigDict(strict=True)


def add_error_answers(
    app: FastAPI,
    statuses: Mapping[type[Exception], int],
    answer: Callable[[int, str, Exception | None], Response],
    *,
    internal: str,
) -> None:
    """Answer errors of an application.

    Args:
        app: the application.
        statuses: status of each error whose text is for the client.
        answer: makes an answer from the status, the text and the error.
        internal: text for all other errors, which are logged and not passed to `answer`.
    """

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED)  # nobody reads it
        if isinstance(error, HTTPException):
            refusal = answer(error.status_code, f"{error.detail}: {request.method} {request.url.path[:200]}", error)
            refusal.headers.update(error.headers or {})
            return refusal
        status = next((statuses[kind] for kind in type(error).__mro__ if kind in statuses), None)
        return answer(500, internal, None) if status is None else answer(status, str(error), error)

    for kind in (*statuses, ClientDisconnect, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def url_of(host: str, port: int) -> str:
    """The URL of an address, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address that does not listen yet: connections are refused until the model is loaded.

    Raises:
        UserError: when the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(
            f"host and port must be an address that is free here, got {host}:{port} ({error.strerror}): choose another"
        ) from error
    return listener


class WebServer(uvicorn.Server):
    """Serves an application, and reports when it accepts connections."""

    def __init__(
        self, app: FastAPI, *, closing_seconds: int, started: Callable[[str], object] = lambda url: None
    ) -> None:
        """Take the time for running requests at the end, and the function that receives the URL when it listens."""
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=closing_seconds,
                http=limited_protocol(connections_that_fit()),
                backlog=BACKLOG,
            )
        )
        limit_lines("asyncio", "uvicorn.error")
        self._report = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and report it."""
        await super().startup(sockets)
        if self.started:
            for listener in sockets or ():
                listener.listen(_WAITING)
                self._report(url_of(*listener.getsockname()[:2]))


@contextlib.contextmanager
def served_in_background(app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Context that serves on an address, in a thread of this process, and yields its URL. Port 0 selects a free port.

    Raises:
        UserError: when the address cannot be bound.
    """
    listener = bound_socket(host, port)
    listener.listen(_WAITING)  # connections wait until the server takes them
    server = WebServer(app, closing_seconds=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server", daemon=True)
    thread.start()
    try:
        yield url_of(host, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
