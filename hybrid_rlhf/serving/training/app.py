"""The application of Tinker's API: access by key, and errors as its client reads them.

The client sends a request again after 408, 409, 429 and 5xx, and asks for a result again after those; 410 means that
the result is lost and the request is to be sent anew; 400, 401, 404 and 413 are final. A command that fails when it
runs has a result with `error` and `category`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Scope

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.serving.admission import Activity, Admission
from hybrid_rlhf.serving.connections import connections_that_fit
from hybrid_rlhf.serving.training.checkpoints import API, FILES, add_checkpoints, add_files
from hybrid_rlhf.serving.training.futures import Gone
from hybrid_rlhf.serving.training.routes import add_results, add_routes, add_views
from hybrid_rlhf.serving.training.service import TrainingService
from hybrid_rlhf.serving.training.store import DiskFull, UnknownObject
from hybrid_rlhf.serving.training.tenants import QuotaExceeded, Tenant, Tenants
from hybrid_rlhf.serving.web import AccessRules, Arriving, add_error_answers

_STATUSES: dict[type[Exception], int] = {
    UserError: 400,
    DiskFull: 400,  # final: the client shows it
    UnknownObject: 404,
    Gone: 410,
    QuotaExceeded: 429,
}
_OPEN_PATHS = ("/metrics", f"{API}/healthz")
"""Paths that need no key."""
_POLL_SECONDS = 20.0
"""Longest time that a request for a result waits; the client gives up after 45."""
_CONTENT_TYPES = ("application/json", "application/x-protobuf", "application/zip")


class TenantAdmission(Admission):
    """Refuses requests against the access rules, without a key, or while the server stops; the others have a tenant."""

    open_paths = _OPEN_PATHS

    def __init__(self, app: ASGIApp, /, *, tenants: Tenants, **settings: Any) -> None:
        """Take the keys, and what Admission takes."""
        super().__init__(app, **settings)
        self._tenants = tenants
        self._most_requests = connections_that_fit() // min(2, len([*tenants]))
        """Largest number of a key's requests at a time: they hold connections, of which others need some."""

    def _arriving(self, scope: Scope) -> Arriving:
        tenant: Tenant | None = scope.get("state", {}).get("tenant")
        return super()._arriving(scope) if tenant is None else tenant.arriving

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        try:
            self._rules.require_origin(headers)
            if not self._tenants.has_keys:  # with a key, any Host: a page of another site does not have it
                self._rules.require_host(headers)
        except HTTPException as refusal:
            return _error(refusal.status_code, refusal.detail)
        if scope["path"] in _OPEN_PATHS or scope["path"].startswith(FILES):
            return None
        tenant = self._tenants.of_key(headers.get("x-api-key", ""))
        if tenant is None:
            return _error(401, "requests must carry a key of this server, this one does not: set TINKER_API_KEY to one")
        if tenant.arriving.requests >= self._most_requests:
            return _error(
                429, f"a key has at most {self._most_requests} connections that wait for an answer: send it again later"
            )
        if self._activity.stops:
            return _error(503, "the server stops: send the request again later")
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] in ("POST", "PUT") and content_type not in _CONTENT_TYPES:
            return _error(415, f"Content-Type must be one of {', '.join(_CONTENT_TYPES)}, got {content_type[:100]!r}")
        scope.setdefault("state", {}).update(tenant=tenant, max_body_bytes=self._max_body_bytes)
        return None


def build_app(
    service: TrainingService, *, host: str, activity: Activity, max_body_bytes: int, poll_seconds: float = _POLL_SECONDS
) -> FastAPI:
    """The application.

    Args:
        service: what it serves.
        host: address that it listens on.
        activity: counts requests, and tells that the server stops.
        max_body_bytes: largest body, after decompression.
        poll_seconds: longest time that a request for a result waits.
    """

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            app.state.failed = True
            logger.error("the task that feeds the engine has failed", exc_info=task.exception())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(service.worker.work())
        task.add_done_callback(ended)
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = FastAPI(title="hybrid_rlhf", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.failed = False
    app.add_middleware(
        TenantAdmission,
        tenants=service.tenants,
        requests=service.metrics.requests,
        rules=AccessRules(host),
        activity=activity,
        max_body_bytes=max_body_bytes,
    )
    add_error_answers(app, _STATUSES, lambda status, text, _: _error(status, text), internal="the server has failed")
    router = APIRouter()
    add_routes(router, service)
    add_views(router, service)
    add_results(router, service, activity, poll_seconds)
    add_checkpoints(router, service)
    add_files(router, service)
    app.include_router(router, prefix=API)
    app.get("/metrics")(service.metrics.answer)
    return app


def _error(status: int, message: str) -> JSONResponse:
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    category = "server" if status >= 500 else "user"
    return JSONResponse({"error": message, "category": category}, status, headers)
