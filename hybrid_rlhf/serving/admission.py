"""Which requests a server takes: it counts all, and refuses some before any of their content is read."""

from __future__ import annotations

import asyncio
import hmac

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid_rlhf.serving.access import AccessRules
from hybrid_rlhf.serving.metrics import ServerMetrics

CLIENT_CLOSED = 499
"""Status that is counted for a client that disconnects; it receives none."""
_OPEN_PATHS = ("/health", "/metrics")
"""Those that need no key and have no texts."""
_RETRY_SECONDS = 5
"""After which a client may ask a server that stops again, or the one that follows it."""


class Activity:
    """What a server does at present."""

    def __init__(self) -> None:
        self.requests = 0
        """That are being answered."""
        self.stops = False
        """Whether further ones are refused."""


class Admission:
    """ASGI middleware: refuses what the rules of access refuse, requests without the API key, and all others while the
    server stops."""

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, api_key: str | None, rules: AccessRules, activity: Activity
    ) -> None:
        self._app, self._metrics, self._api_key = app, metrics, api_key
        self._rules, self._activity = rules, activity

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

        refusal = self._refusal(scope, Headers(scope=scope))
        counts = refusal is None and scope["path"] not in _OPEN_PATHS
        self._activity.requests += counts
        try:
            await (self._app if refusal is None else refusal)(scope, receive, counted)
        except asyncio.CancelledError:
            if not self._activity.stops:  # else: the client has not taken its answer in time
                raise
        finally:
            self._activity.requests -= counts
            path = getattr(scope.get("route"), "path", "other")  # a label has few values, whatever is asked for
            self._metrics.requests.labels(path, str(status)).inc()

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """Why a request is refused, as an answer; none: it is not.

        With a key, any Host is accepted: a page of another site does not have the key, and a proxy or a container has
        names that this machine does not know.
        """
        rules, is_open = self._rules, scope["path"] in _OPEN_PATHS
        refused = rules.origin_refusal(headers) or (rules.host_refusal(headers) if self._api_key is None else None)
        if refused is not None:
            return error_response(*refused, "invalid_request_error")
        if not is_open and not self._has_key(headers):
            message = "requests must carry the server's API key, this one does not: send Authorization: Bearer KEY"
            return error_response(401, message, "authentication_error", "invalid_api_key")
        if not is_open and self._activity.stops:
            answer = error_response(503, "the server stops: send the request again later", "server_error", "stopped")
            answer.headers["Retry-After"] = str(_RETRY_SECONDS)
            return answer
        refused = rules.content_refusal(scope["method"], headers)
        return None if refused is None else error_response(*refused, "invalid_request_error")

    def _has_key(self, headers: Headers) -> bool:
        if self._api_key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._api_key.encode())


def error_response(
    status: int, message: str, kind: str, code: str | None = None, *, param: str | None = None
) -> JSONResponse:
    """OpenAI's error object; `param` is the key of the body that is wrong."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)
