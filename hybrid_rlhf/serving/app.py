"""Routes of the server: OpenAI's API, health and metrics; access and errors.

A request that fails has OpenAI's error object. A client that disconnects cancels its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.admission import Activity, KeyAdmission, error_response
from hybrid_rlhf.serving.answers import Answer
from hybrid_rlhf.serving.bodies import (
    AdapterBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    ScoreBody,
    TokenizeBody,
    read_request,
)
from hybrid_rlhf.serving.episodes import EpisodeQueue, episode_routes
from hybrid_rlhf.serving.metrics import ServerMetrics
from hybrid_rlhf.serving.responses import ResponseBody, response_events, response_of
from hybrid_rlhf.serving.scores import ScoreService
from hybrid_rlhf.serving.service import (
    BatchEnded,
    BatchFailed,
    QueueFull,
    RequestFailed,
    Service,
    TokenStream,
    UnknownEpisode,
    UnknownModel,
)
from hybrid_rlhf.serving.updates import ModelUpdates
from hybrid_rlhf.serving.web import CLIENT_CLOSED, AccessRules, FiniteJSON, add_error_answers, beside

_STATUSES: dict[type[Exception], int] = {
    UserError: 400,
    UnknownModel: 404,
    UnknownEpisode: 404,
    QueueFull: 429,
    BatchEnded: 503,
    BatchFailed: 503,
    RequestFailed: 500,
}
"""HTTP statuses of the errors of a request."""
_UNSUPPORTED = (
    "assistants",
    "audio",
    "batches",
    "embeddings",
    "files",
    "fine_tuning",
    "images",
    "moderations",
    "threads",
)
"""Parts of OpenAI's API that no server of this project has."""
_MOST_BODY_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Access:
    """Settings of a server's access."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    api_key: str | None = None
    """Bearer token that requests to the API must send; None requires no token."""
    origins: Sequence[str] = ()
    """Origins of other sites whose pages may send requests."""


def build_app(
    service: Service,
    access: Access,
    *,
    created: int,
    activity: Activity | None = None,
    episodes: Callable[[str], Service] | None = None,
    queue: EpisodeQueue | None = None,
    scores: ScoreService | None = None,
    updates: ModelUpdates | None = None,
) -> FastAPI:
    """The application of a model that generates.

    Args:
        service: service of the model.
        access: settings of access.
        created: time at which the model was loaded, in seconds since 1970.
        activity: counts requests, and tells that the server stops; None if it never stops.
        episodes: returns the service of an episode by name, whose API is then at /episodes/NAME/v1, or raises
            UnknownEpisode; None: the API of `service` is at /v1.
        queue: episodes for programs outside of this process; None without such episodes.
        scores: service of a reward model at /score and /v1/score; None without these routes.
        updates: changes of the adapters at /v1/adapters; None without this route.
    """
    app = _bare_app(service.metrics, access, activity, lambda: service.failed)

    def asked(request: Request) -> Service:
        return service if episodes is None else episodes(request.path_params["episode"])

    prefix = "/v1" if episodes is None else "/episodes/{episode}/v1"
    app.include_router(_api(prefix, asked, created, scores))
    if episodes is None:
        _add_tokenizer(app, service)
    if updates is not None:
        _add_updates(app, service, updates, created)
    if queue is not None:
        app.include_router(episode_routes(queue))
    if scores is not None:
        _add_scores(app, scores, service.call)
    return app


def build_scoring_app(
    scores: ScoreService, access: Access, *, created: int, activity: Activity | None = None
) -> FastAPI:
    """The application of a reward model alone; see `build_app`."""
    app = _bare_app(ServerMetrics(None), access, activity, lambda: False)
    thread = ThreadPoolExecutor(1, "scores")  # the only thread that uses the device

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


def _bare_app(metrics: ServerMetrics, access: Access, activity: Activity | None, failed: Callable[[], bool]) -> FastAPI:
    """An application with errors, access, health and metrics."""
    activity = activity or Activity()
    app = FastAPI(title="hybrid-rlhf serve", docs_url=None, redoc_url=None)
    add_error_answers(app, _STATUSES, _error_answer, internal="internal error, see the server's log: report it")
    app.add_middleware(
        KeyAdmission,
        api_key=access.api_key,
        requests=metrics.requests,
        rules=AccessRules(access.host, access.origins),
        activity=activity,
        max_body_bytes=_MOST_BODY_BYTES,
    )
    if access.origins:  # the outermost middleware: errors need its headers too, and preflights have no key
        app.add_middleware(
            CORSMiddleware, allow_origins=access.origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"]
        )

    @app.get("/health")
    async def health() -> Response:
        if failed():
            return error_response(503, "decoding has failed: the server ends", "failed")
        if activity.stops:
            return error_response(503, "the server stops", "stopped")
        return JSONResponse({"status": "ok"})

    async def unsupported(request: Request) -> Response:
        name = request.url.path.split("/")[2]
        text = f"{name} {'are' if name.endswith('s') else 'is'} not supported: GET /openapi.json lists what is"
        return error_response(404, text, "unsupported_endpoint")

    app.get("/metrics")(metrics.answer)
    for name in _UNSUPPORTED:
        for path in (f"/v1/{name}", f"/v1/{name}/{{rest:path}}"):
            app.add_api_route(path, unsupported, methods=["GET", "POST"], include_in_schema=False)
    return app


def _api(prefix: str, asked: Callable[[Request], Service], created: int, scores: ScoreService | None) -> APIRouter:
    """Routes of OpenAI's API, for the service that `asked` returns for a request."""
    router = APIRouter(prefix=prefix)

    @router.get("/models")
    async def all_models(request: Request) -> dict[str, Any]:
        service = asked(request)
        scoring_models = [] if scores is None else [_entry(scores.name, created)]
        served = {service.name: service, **service.adapters}  # the adapter of a followed run has the model's name
        models = [_model(served_model, service, created) for served_model in served.values()]
        return {"object": "list", "data": [*models, *scoring_models]}

    @router.get("/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        if scores is not None and name == scores.name:
            return _entry(name, created)
        service = asked(request)
        return _model(service.of_model(name), service, created)

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _generate(asked(request), request, await read_request(request, ChatBody))

    @router.post("/responses")
    async def responses(request: Request) -> Response:
        body = await read_request(request, ResponseBody)
        return await _generate(asked(request), request, body.chat(), body)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        return await _generate(asked(request), request, await read_request(request, CompletionBody))

    return router


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    """Add vLLM's routes of the tokenizer."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_request(request, TokenizeBody)
        return FiniteJSON(await beside(request, service.of_model(body.model).tokenized, body))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_request(request, DetokenizeBody)
        return FiniteJSON(await beside(request, service.of_model(body.model).detokenized, body))


def _add_updates(app: FastAPI, service: Service, updates: ModelUpdates, created: int) -> None:
    """Add the routes that change the adapters."""

    @app.post("/v1/adapters")
    async def load(request: Request) -> Response:
        body = await read_request(request, AdapterBody)
        loaded = await updates.load_adapter(body.name, body.path)
        return JSONResponse(_model(loaded, service, created))

    @app.delete("/v1/adapters/{name:path}")
    async def unload(name: str) -> Response:
        await updates.unload_adapter(name)
        return JSONResponse({"id": name, "object": "model", "deleted": True})


def _add_scores(app: FastAPI, scores: ScoreService, call: Callable[[Callable[[], Tensor]], Future[Tensor]]) -> None:
    """Add the routes of scores; `call` runs a function on the thread that uses the device."""

    @app.post("/score")
    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        body = await read_request(request, ScoreBody)
        scores.check_name(body.model)
        return _whole(await _until_disconnect(request.receive, scores.answer(body, call)))


class EventStream(StreamingResponse):
    """Server-sent events; cancels the request if the client disconnects, even before the first token."""

    def __init__(self, events: AsyncIterator[str], stream: TokenStream) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await _until_disconnect(receive, self.stream_response(send))
        finally:
            self._stream.close()


async def _generate(
    asked: Service, request: Request, body: GenerationBody, as_response: ResponseBody | None = None
) -> Response:
    """Answer a request; `as_response`: in the form of the Responses API, which asks for it."""
    service = asked.of_model(body.model)
    job = await beside(request, service.job, body)
    compiled = await _until_disconnect(request.receive, service.compiled(body, job))
    if compiled is None:
        return Response(status_code=CLIENT_CLOSED)
    job = compiled
    answer = Answer(body, job, service.tokenizer, service.token_text)  # first: an error must not leave a stream open
    await service.admits.wait()  # other weights are being loaded
    answer.version = service.version
    stream = service.start(job, whole=not body.stream) if body.generates else None
    if body.stream:
        assert stream is not None
        events = answer.events(stream) if as_response is None else response_events(as_response, answer, stream)
        return EventStream(_closed_by_errors(events), stream)

    async def work() -> dict[str, Any]:
        echoes = body.echoes and body.alternatives is not None
        if echoes or body.prompt_logprobs is not None:
            top = max(job.top_logprobs * echoes, body.prompt_logprobs or 0)
            images = job.images or [None] * len(job.prompts)
            prompts = [
                await service.prompt_tokens(prompt, shown, top=top)
                for prompt, shown in zip(job.prompts, images, strict=True)
            ]
            answer.echoed = prompts if echoes else []
        whole = await answer.whole(stream)
        if body.prompt_logprobs is not None:
            holders = [whole] if isinstance(body, ChatBody) else whole["choices"]
            for place, holder in enumerate(holders):
                tokens = prompts[place // job.sampling.n]
                holder["prompt_logprobs"] = answer.prompt_logprobs(tokens, body.prompt_logprobs)
        return whole if as_response is None else response_of(as_response, whole)

    try:
        whole = await _until_disconnect(request.receive, work())
    finally:
        if stream is not None:
            stream.close()
    return _whole(whole)


def _whole(answer: dict[str, Any] | None) -> Response:
    """The response of an answer that is not streamed; None means that the client has disconnected."""
    return Response(status_code=CLIENT_CLOSED) if answer is None else FiniteJSON(answer)


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of work, which is cancelled when the client disconnects; then None."""

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
    """The events; if decoding fails, an error object replaces the rest."""
    try:
        async for event in events:
            yield event
    except (BatchFailed, RequestFailed) as error:
        answer = _error_answer(_STATUSES[type(error)], str(error), error)
        yield f"data: {bytes(answer.body).decode()}\n\n"
        yield "data: [DONE]\n\n"


def _model(service: Service, base: Service, created: int) -> dict[str, Any]:
    entry = {**_entry(service.name, created), "max_model_len": service.batch.max_tokens, "version": service.version}
    return entry if service.name == base.name else {**entry, "parent": base.name}


def _entry(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "hybrid_rlhf"}


def _error_answer(status: int, message: str, error: Exception | None) -> JSONResponse:
    return error_response(status, message, getattr(error, "code", None), param=getattr(error, "key", None))
