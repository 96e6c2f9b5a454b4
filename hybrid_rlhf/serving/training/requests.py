"""What a request carries: who sent it, its body, and which part of a list it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar

import pyarrow
from fastapi import Depends, Request

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.reading import NotJSON, parse_json
from hybrid_rlhf.serving.training.bodies import BodyT, read_body
from hybrid_rlhf.serving.training.store import JsonObject
from hybrid_rlhf.serving.training.tenants import Tenant
from hybrid_rlhf.serving.web import require_bounded_json, require_size

ItemT = TypeVar("ItemT")
ReadT = TypeVar("ReadT")
_MOST_ITEMS = 256


def _sender(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


Sender = Annotated[Tenant, Depends(_sender)]
"""The key that sent a request, which was admitted."""


async def read(request: Request, reader: Callable[[bytes], ReadT], most: int | None = None) -> ReadT:
    """What `reader` makes of the body, decompressed, of at most `most` bytes (None: the setting). It is called on
    another thread than the event loop's; the bodies of a key one after another, so that others have threads too.

    Raises:
        UserError: when it is not compressed as its header says, or by the reader.
        HTTPException: when it is too large.
    """
    content = await request.body()
    encoding = request.headers.get("content-encoding", "identity")
    most = min(request.state.max_body_bytes, most or request.state.max_body_bytes)

    def work() -> ReadT:
        return reader(_decompressed(content, encoding, most))

    tenant: Tenant = request.state.tenant
    async with tenant.reading:
        return await asyncio.to_thread(work)


def _decompressed(content: bytes, encoding: str, most: int) -> bytes:
    if encoding == "zstd":
        try:
            content = pyarrow.input_stream(pyarrow.py_buffer(content), compression="zstd").read(most + 1)
        except OSError as error:
            raise UserError("Content-Encoding zstd needs a body in that format, got another: compress it") from error
    elif encoding != "identity":
        raise UserError(f"Content-Encoding must be zstd or none, got {encoding[:100]!r}: leave it out")
    require_size(len(content), most)
    return content


def json_object(content: bytes) -> JsonObject:
    """The JSON object of a body; an empty body is an empty object.

    Raises:
        UserError: for another body.
    """
    require_bounded_json(content)
    try:
        value = parse_json(content.decode() or "{}")
    except (NotJSON, UnicodeDecodeError) as error:
        raise UserError(f"the body must be JSON in UTF-8, it is not ({error}): correct it") from error
    if not isinstance(value, dict):
        raise UserError("the body must be a JSON object, got another value: send one")
    return value


async def body_of(request: Request, kind: type[BodyT]) -> BodyT:
    """A body of a kind; raises as `read` and `json_object`."""
    return await read(request, lambda content: read_body(json_object(content), kind), kind.most_bytes)


def page(request: Request, items: list[ItemT]) -> tuple[list[ItemT], dict[str, int]]:
    """The items that a query asks for, at most a number of them, and where they are."""
    window: dict[str, int] = {}
    for key, default in (("offset", "0"), ("limit", "100")):
        text = request.query_params.get(key, default)
        if not text.isdecimal() or len(text) > 9:
            raise UserError(f"{key} must be a number of 0 or more, got {text[:100]!r}: correct it")
        window[key] = int(text)
    window["limit"] = min(window["limit"], _MOST_ITEMS)
    return items[window["offset"] :][: window["limit"]], {**window, "total_count": len(items)}
