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
from hybrid_rlhf.serving.web import require_few_values, require_size

ItemT = TypeVar("ItemT")
ReadT = TypeVar("ReadT")


def _sender(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


Sender = Annotated[Tenant, Depends(_sender)]
"""The key that sent a request, which was admitted."""


async def read(request: Request, reader: Callable[[bytes], ReadT]) -> ReadT:
    """What `reader` makes of the body, decompressed. It is called on another thread than the event loop's.

    Raises:
        UserError: when it is not compressed as its header says, or by the reader.
        HTTPException: when it is too large.
    """
    content = await request.body()
    encoding = request.headers.get("content-encoding", "identity")
    most = request.state.max_body_bytes

    def work() -> ReadT:
        return reader(_decompressed(content, encoding, most))

    return await asyncio.to_thread(work)


def _decompressed(content: bytes, encoding: str, most: int) -> bytes:
    if encoding == "zstd":
        try:
            content = pyarrow.input_stream(pyarrow.py_buffer(content), compression="zstd").read(most + 1)
        except OSError as error:
            raise UserError("Content-Encoding zstd needs a body in that format, got another: compress it") from error
        require_size(len(content), most)
    elif encoding != "identity":
        raise UserError(f"Content-Encoding must be zstd or none, got {encoding[:100]!r}: leave it out")
    return content


def json_object(content: bytes) -> JsonObject:
    """The JSON object of a body; an empty body is an empty object.

    Raises:
        UserError: for another body.
    """
    require_few_values(content)
    try:
        value = parse_json(content.decode() or "{}")
    except (NotJSON, UnicodeDecodeError) as error:
        raise UserError(f"the body must be JSON in UTF-8, it is not ({error}): correct it") from error
    if not isinstance(value, dict):
        raise UserError("the body must be a JSON object, got another value: send one")
    return value


async def body_of(request: Request, kind: type[BodyT]) -> BodyT:
    """A body of a kind; raises as `read` and `json_object`."""
    return await read(request, lambda content: read_body(json_object(content), kind))


def page(request: Request, items: list[ItemT]) -> tuple[list[ItemT], dict[str, int]]:
    """The items that a query asks for, and where they are."""
    window: dict[str, int] = {}
    for key, default in (("offset", "0"), ("limit", "100")):
        text = request.query_params.get(key, default)
        if not text.isdecimal() or len(text) > 9:
            raise UserError(f"{key} must be a number of 0 or more, got {text[:100]!r}: correct it")
        window[key] = int(text)
    return items[window["offset"] :][: window["limit"]], {**window, "total_count": len(items)}
