"""Admission of requests: counts all, and refuses some before their content is read."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi.responses import JSONResponse
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.serving.tracing import begin_span, end_span
from hybrid_rlhf.serving.web import CLIENT_CLOSED, AccessRules, Arriving, limited

access_log = logging.getLogger(f"{LOGGER_NAME}.access")
access_log.setLevel(logging.WARNING)  # serve --access_log lowers it
_OPEN_PATHS = ("/health", "/metrics")
"""Paths that need no key, as they contain no texts."""
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
"""OpenAI's types of errors with these statuses."""
_MOST_LOGGED = 200
"""Number of characters of a path in the log."""
_ARRIVING_BODIES = 16
"""Number of largest bodies that may arrive at a time."""
_RETRY_SECONDS = 5
"""Time after which a client may repeat a request to a stopping server, or to its successor."""


@dataclass
class Activity:
    """Current activity of a server."""

    requests: int = 0
    """Number of requests that are being answered."""
    stops: bool = False
    """True if further requests are refused."""


class Admission(ABC):
    """ASGI middleware that counts requests, and refuses some before their content is read."""

    open_paths: ClassVar[Sequence[str]]
    """Paths of requests that do not keep the server from stopping."""

    def __init__(
        self, app: ASGIApp, *, requests: Counter, rules: AccessRules, activity: Activity, max_body_bytes: int
    ) -> None:
        """Take the application.

        Args:
            app: what admitted requests are passed to.
            requests: counts by path and status.
            rules: hosts and origins that may ask.
            activity: of the server.
            max_body_bytes: largest body of a request.
        """
        self._app = app
        self._requests = requests
        self._rules = rules
        self._activity = activity
        self._max_body_bytes = max_body_bytes
        self._all_arriving = Arriving(_ARRIVING_BODIES * max_body_bytes)

    @abstractmethod
    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """The answer that refuses a request; None if it is admitted."""

    def _arriving(self, scope: Scope) -> Arriving:
        """What counts the bodies of the sender of a request."""
        return self._all_arriving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        headers = Headers(scope=scope)
        start = time.perf_counter()
        span = begin_span(scope["method"], headers)
        refusal = self._refusal(scope, headers)
        if refusal is not None and scope["method"] in ("POST", "PUT"):
            refusal.headers["Connection"] = "close"  # or its body would be read, whatever its size
        counts = refusal is None and scope["path"] not in self.open_paths
        self._activity.requests += counts
        try:
            with limited(receive, self._max_body_bytes, self._arriving(scope)) as body:
                await (self._app if refusal is None else refusal)(scope, body, counted)
        except asyncio.CancelledError:
            if not self._activity.stops:  # otherwise the client has not read its answer in time
                raise
        finally:
            self._activity.requests -= counts
            path = getattr(scope.get("route"), "path", "other")  # few values of a label, whatever clients request
            self._requests.labels(path, str(status)).inc()
            seconds = time.perf_counter() - start
            asked = scope["path"][:_MOST_LOGGED]
            access_log.info("%s %r: status %d after %.3f s", scope["method"], asked, status, seconds)
            if span is not None:
                end_span(span, scope["method"], path, status)


class KeyAdmission(Admission):
    """Refuses requests against the access rules, requests without the API key, and all requests while the server
    stops."""

    open_paths = _OPEN_PATHS

    def __init__(self, app: ASGIApp, /, *, api_key: str | None, **settings: Any) -> None:
        """Set the key (None: requests need no key), and the settings of Admission."""
        super().__init__(app, **settings)
        self._api_key = api_key

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """The answer that refuses a request; None if it is admitted.

        With a key, any Host is accepted: a page of another site does not have the key, and a proxy or a container has
        names that this machine does not know.
        """
        try:
            self._rules.require_origin(headers)
            if self._api_key is None:
                self._rules.require_host(headers)
            if scope["path"] not in _OPEN_PATHS:
                if not self._has_key(headers):
                    message = (
                        "requests must carry the server's API key, this one does not: send Authorization: Bearer KEY"
                    )
                    return error_response(401, message, "invalid_api_key")
                if self._activity.stops:
                    answer = error_response(503, "the server stops: send the request again later", "stopped")
                    answer.headers["Retry-After"] = str(_RETRY_SECONDS)
                    return answer
            self._rules.require_json(scope["method"], headers)
        except HTTPException as refusal:
            return error_response(refusal.status_code, refusal.detail)
        return None

    def _has_key(self, headers: Headers) -> bool:
        if self._api_key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._api_key.encode())


def error_response(status: int, message: str, code: str | None = None, *, param: str | None = None) -> JSONResponse:
    """OpenAI's error object, whose type follows from the status; `param` is the faulty key of the body."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)
