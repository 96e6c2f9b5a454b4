"""What a request carries: who sent it, its body, and which part of a list it asks for."""

from __future__ import annotations

from typing import Annotated, TypeVar

import pyarrow
from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.reading import NotJSON, parse_json
from hybrid_rlhf.serving.training.bodies import BodyT, read_body
from hybrid_rlhf.serving.training.store import JsonObject
from hybrid_rlhf.serving.training.tenants import Tenant

ItemT = TypeVar("ItemT")


class TooLarge(HTTPException):
    """A body is larger than a server takes."""


def _sender(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


Sender = Annotated[Tenant, Depends(_sender)]
"""The key that sent a request, which was admitted."""


class BodyReader:
    """Reads bodies up to a size."""

    def __init__(self, most: int) -> None:
        """Take the number of bytes, after decompression."""
        self.most = most

    async def whole(self, request: Request) -> bytes:
        """The body, decompressed.

        Raises:
            UserError: when it is not compressed as its header says.
            TooLarge: when it is too large.
        """
        chunks = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            self._require(size)
            chunks.append(chunk)
        content = b"".join(chunks)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "zstd":
            try:
                stream = pyarrow.input_stream(pyarrow.py_buffer(content), compression="zstd")
                content = stream.read(self.most + 1)
            except OSError as error:
                raise UserError(
                    "Content-Encoding zstd needs a body in that format, got another: compress it"
                ) from error
            self._require(len(content))
        elif encoding != "identity":
            raise UserError(f"Content-Encoding must be zstd or none, got {encoding[:100]!r}: leave it out")
        return content

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """A body of a kind; raises as `json`."""
        value, _ = await self.json(request)
        return read_body(value, kind)

    async def json(self, request: Request) -> tuple[JsonObject, bytes]:
        """The JSON object of a body, and its bytes; an empty body is an empty object.

        Raises:
            UserError: for another body.
            TooLarge: when it is too large.
        """
        content = await self.whole(request)
        try:
            value = parse_json(content.decode() or "{}")
        except (NotJSON, UnicodeDecodeError) as error:
            raise UserError(f"the body must be JSON in UTF-8, it is not ({error}): correct it") from error
        if not isinstance(value, dict):
            raise UserError("the body must be a JSON object, got another value: send one")
        return value, content

    def _require(self, size: int) -> None:
        if size > self.most:
            raise TooLarge(413, f"a body has at most {self.most} bytes, this one has more: send several requests")


def page(request: Request, items: list[ItemT]) -> tuple[list[ItemT], dict[str, int]]:
    """The items that a query asks for, and where they are."""
    window: dict[str, int] = {}
    for key, default in (("offset", "0"), ("limit", "100")):
        text = request.query_params.get(key, default)
        if not text.isdecimal() or len(text) > 9:
            raise UserError(f"{key} must be a number of 0 or more, got {text[:100]!r}: correct it")
        window[key] = int(text)
    return items[window["offset"] :][: window["limit"]], {**window, "total_count": len(items)}
