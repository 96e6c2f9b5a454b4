"""Routes of the server: OpenAI's API, health and metrics; who may ask, and what an error looks like.

A request that fails has OpenAI's error object. A client that disconnects cancels its request.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.answers import Answer
from hybrid_rlhf.serving.bodies import ChatBody, CompletionBody, GenerationBody, ScoreBody, read_request
from hybrid_rlhf.serving.episodes import EpisodeQueue, episode_routes
from hybrid_rlhf.serving.metrics import ServerMetrics
from hybrid_rlhf.serving.scores import ScoreService
from hybrid_rlhf.serving.service import BatchEnded, QueueFull, Service, TokenStream, UnknownEpisode, UnknownModel

_CLIENT_CLOSED = 499
"""Status that is counted for a client that disconnects; it receives none."""
_STATUSES: dict[type[Exception], tuple[int, str, str | None]] = {
    UserError: (400, "invalid_request_error", None),
    UnknownModel: (404, "invalid_request_error", "model_not_found"),
    UnknownEpisode: (404, "invalid_request_error", "episode_not_found"),
    QueueFull: (429, "rate_limit_error", "queue_full"),
    BatchEnded: (503, "server_error", "stopped"),
}
"""HTTP status, and OpenAI's type and code, of what a request may raise."""
_OPEN_PATHS = ("/health", "/metrics")
"""Those that need no key and have no texts."""


def build_app(
    service: Service,
    *,
    api_key: str | None,
    created: int,
    episodes: Callable[[str], Service] | None = None,
    queue: EpisodeQueue | None = None,
    scores: ScoreService | None = None,
) -> FastAPI:
    """The application of a model that generates.

    Args:
        service: of the model.
        api_key: what requests to the API must send as a bearer token; none: nothing.
        created: when the model was loaded, in seconds since 1970.
        episodes: gives the service of an episode by its name, whose API is then below /episodes/NAME/v1, or raises
            UnknownEpisode; none: the API of `service` is below /v1.
        queue: of the episodes that programs outside of this process play; none: there are none.
        scores: of a reward model, at /score and /v1/score; none: those do not exist.
    """
    app = _bare_app(service.metrics, api_key, lambda: service.failed)

    def asked(request: Request) -> Service:
        return service if episodes is None else episodes(request.path_params["episode"])

    app.include_router(_api(asked, created, scores), prefix="/v1" if episodes is None else "/episodes/{episode}/v1")
    if queue is not None:
        app.include_router(episode_routes(queue))
    if scores is not None:
        _add_scores(app, scores, service.call)
    return app


def build_scoring_app(scores: ScoreService, *, api_key: str | None, created: int) -> FastAPI:
    """The application of a reward model alone; see `build_app`."""
    app = _bare_app(ServerMetrics(None), api_key, lambda: False)
    thread = ThreadPoolExecutor(1, "scores")  # the only one that uses the device

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_entry(scores.name, created)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        scores.check_name(name)
        return _entry(name, created)

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def refuse() -> Response:
        raise UserError(
            f"completions need a model that generates, {scores.name} is a reward model: send conversations to /score"
        )

    _add_scores(app, scores, thread.submit)
    return app


def _bare_app(metrics: ServerMetrics, api_key: str | None, failed: Callable[[], bool]) -> FastAPI:
    """Errors, access, health and metrics."""
    app = FastAPI(title="hybrid-rlhf serve", docs_url=None, redoc_url=None)
    for kind, (status, error_type, code) in _STATUSES.items():
        app.add_exception_handler(kind, _handler(status, error_type, code))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)  # it is logged too
    app.add_middleware(AccessCheck, metrics=metrics, api_key=api_key)

    @app.get("/health")
    async def health() -> Response:
        if failed():
            return error_response(503, "the batch has failed: restart the server", "server_error", "failed")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def counted() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _api(asked: Callable[[Request], Service], created: int, scores: ScoreService | None) -> APIRouter:
    """Routes of OpenAI's API, of the service that `asked` gives for a request."""
    router = APIRouter()

    @router.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        service = asked(request)
        others = [] if scores is None else [_entry(scores.name, created)]
        served = [service, *service.adapters.values()]
        return {"object": "list", "data": [*(_model(each, service, created) for each in served), *others]}

    @router.get("/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        if scores is not None and name == scores.name:
            return _entry(name, created)
        service = asked(request)
        return _model(service.of_model(name), service, created)

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _generate(asked(request), request, await read_request(request, ChatBody))

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        return await _generate(asked(request), request, await read_request(request, CompletionBody))

    return router


def _add_scores(app: FastAPI, scores: ScoreService, call: Callable[[Callable[[], Tensor]], Future[Tensor]]) -> None:
    """Add the routes of scores; `call` has the thread that uses the device call a function."""

    @app.post("/score")
    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        body = await read_request(request, ScoreBody)
        scores.check_name(body.model)
        return _whole(await _until_disconnect(request.receive, scores.answer(body, call)))


def error_response(
    status: int, message: str, kind: str, code: str | None = None, *, param: str | None = None
) -> JSONResponse:
    """OpenAI's error object; `param` is the key of the body that is wrong."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


class AccessCheck:
    """ASGI middleware: refuses requests without the API key, and counts all."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, api_key: str | None) -> None:
        self._app, self._metrics, self._api_key = app, metrics, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_CLOSED

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            if scope["path"] not in _OPEN_PATHS and not self._is_allowed(Headers(scope=scope)):
                message = "requests must carry the server's API key, this one does not: send Authorization: Bearer KEY"
                refusal = error_response(401, message, "authentication_error", "invalid_api_key")
                await refusal(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            path = getattr(scope.get("route"), "path", "other")  # a label has few values, whatever is asked for
            self._metrics.requests.labels(path, str(status)).inc()

    def _is_allowed(self, headers: Headers) -> bool:
        if self._api_key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._api_key.encode())


class EventStream(StreamingResponse):
    """Server-sent events; cancels the request when the client disconnects, also before its first token."""

    def __init__(self, events: AsyncIterator[str], stream: TokenStream) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await _until_disconnect(receive, self.stream_response(send))
        finally:
            self._stream.close()


async def _generate(asked: Service, request: Request, body: GenerationBody) -> Response:
    service = asked.of_model(body.model)
    job = service.job(body)
    stream = service.start(job, whole=not body.stream)
    answer = Answer(body, job, service.tokenizer)
    if body.stream:
        return EventStream(_closed_by_errors(answer.events(stream)), stream)

    async def work() -> dict[str, Any]:
        whole = await answer.whole(stream)
        if body.prompt_logprobs is not None:
            each = [await service.prompt_logprobs(prompt) for prompt in job.prompts]
            holders = [whole] if isinstance(body, ChatBody) else whole["choices"]
            for place, holder in enumerate(holders):
                holder["prompt_logprobs"] = each[place // job.sampling.n]
        return whole

    try:
        whole = await _until_disconnect(request.receive, work())
    finally:
        stream.close()
    return _whole(whole)


def _whole(answer: dict[str, Any] | None) -> Response:
    """An answer that is not streamed; none: the client has disconnected."""
    return Response(status_code=_CLIENT_CLOSED) if answer is None else JSONResponse(answer)


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of work, which is cancelled when the client disconnects; none then."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnect())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _closed_by_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Events, and an error object in place of the rest if the batch ends."""
    try:
        async for event in events:
            yield event
    except BatchEnded as error:
        yield f"data: {bytes(error_response(503, str(error), 'server_error', 'stopped').body).decode()}\n\n"


def _model(service: Service, base: Service, created: int) -> dict[str, Any]:
    entry = {**_entry(service.name, created), "max_model_len": service.batch.max_tokens}
    return entry if service is base else {**entry, "parent": base.name}


def _entry(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "hybrid_rlhf"}


def _handler(status: int, kind: str, code: str | None) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return error_response(status, str(error), kind, code, param=getattr(error, "key", None))

    return handle


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return error_response(error.status_code, message, "invalid_request_error")


async def _internal_error(request: Request, error: Exception) -> Response:
    return error_response(500, "internal error, see the server's log: report it", "server_error")
