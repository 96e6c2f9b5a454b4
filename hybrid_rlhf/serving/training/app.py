"""Routes of Tinker's API, access by key, and errors as its client reads them.

The client sends a request again after 408, 409, 429 and 5xx, and asks for a result again after those; 410 means that
the result is lost and the request is to be sent anew; 400, 401, 404 and 413 are final. A request that fails when it is
its turn has a result with `error` and `category`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import lzma
import secrets
import time
import zipfile
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pyarrow
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Scope

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.reading import NotJSON, parse_json
from hybrid_rlhf.serving.admission import Activity, Admission
from hybrid_rlhf.serving.training.bodies import (
    BodyT,
    CommandBody,
    CreateModelBody,
    LoadBody,
    ModelId,
    OptimStepBody,
    PathBody,
    RetrieveBody,
    SampleBody,
    SamplerBody,
    SamplerId,
    SaveBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SessionBody,
    SessionId,
    TtlBody,
    read_body,
)
from hybrid_rlhf.serving.training.futures import Gone
from hybrid_rlhf.serving.training.messages import read_forward_backward
from hybrid_rlhf.serving.training.service import TrainingService
from hybrid_rlhf.serving.training.store import KINDS, META_FILE, Checkpoint, Run, UnknownObject
from hybrid_rlhf.serving.training.tenants import QuotaExceeded, Tenant
from hybrid_rlhf.serving.web import AccessRules, add_error_answers

ResultT = TypeVar("ResultT")
_STATUSES: dict[type[Exception], int] = {UserError: 400, UnknownObject: 404, Gone: 410, QuotaExceeded: 429}
_API = "/api/v1"
_OPEN_PATHS = ("/metrics", f"{_API}/healthz")
"""Paths that need no key."""
_FILES = f"{_API}/files/"
"""Begin of signed paths, which need no key either."""
_POLL_SECONDS = 20.0
"""Longest time that a request for a result waits; the client gives up after 45."""
_FILE_SECONDS = 3600
"""Time for which a signed path is valid."""
_CONTENT_TYPES = ("application/json", "application/x-protobuf", "application/zip")
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(NotImplementedError, RuntimeError, OSError, EOFError, ValueError),
)
"""What reading an archive raises whose bytes are not in order."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class TooLarge(HTTPException):
    """A body is larger than a server takes."""


class TenantAdmission(Admission):
    """Refuses requests against the access rules, without a key, or while the server stops; the others have a tenant."""

    open_paths = _OPEN_PATHS

    def __init__(self, app: ASGIApp, service: TrainingService, rules: AccessRules, activity: Activity) -> None:
        """Take the service with the keys, and what Admission takes."""
        super().__init__(app, service.metrics.requests, rules, activity)
        self._service = service

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        try:
            self._rules.require_origin(headers)
            if not self._service.tenants.has_keys:  # with a key, any Host: a page of another site does not have it
                self._rules.require_host(headers)
        except HTTPException as refusal:
            return _error(refusal.status_code, refusal.detail)
        if scope["path"] in _OPEN_PATHS or scope["path"].startswith(_FILES):
            return None
        tenant = self._service.tenants.of_key(headers.get("x-api-key", ""))
        if tenant is None:
            return _error(401, "requests must carry a key of this server, this one does not: set TINKER_API_KEY to one")
        if self._activity.stops:
            return _error(503, "the server stops: send the request again later")
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] in ("POST", "PUT") and content_type not in _CONTENT_TYPES:
            return _error(415, f"Content-Type must be one of {', '.join(_CONTENT_TYPES)}, got {content_type[:100]!r}")
        scope.setdefault("state", {})["tenant"] = tenant
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

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(service.work())
        task.add_done_callback(lambda task: setattr(app.state, "failed", not task.cancelled()))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = FastAPI(title="hybrid_rlhf", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.failed = False
    app.add_middleware(TenantAdmission, service=service, rules=AccessRules(host), activity=activity)
    add_error_answers(app, _STATUSES, lambda status, text, _: _error(status, text), internal="the server has failed")
    body = _BodyReader(max_body_bytes)
    router = APIRouter()
    _add_sessions(router, service, body)
    _add_commands(router, service, body)
    _add_sampling(router, service, body)
    _add_results(router, service, body, activity, poll_seconds)
    _add_checkpoints(router, service, body)
    _add_files(router, service, body)
    app.include_router(router, prefix=_API)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return app


class _BodyReader:
    """Reads bodies up to a size."""

    def __init__(self, most: int) -> None:
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

    async def read(self, request: Request, kind: type[BodyT]) -> tuple[BodyT, bytes]:
        """A body of a kind, and its bytes; raises as `json`."""
        value, content = await self.json(request)
        return read_body(value, kind), content

    async def json(self, request: Request) -> tuple[dict[str, Any], bytes]:
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


def _add_sessions(router: APIRouter, service: TrainingService, body: _BodyReader) -> None:

    @router.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok"}

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        trainer = service.trainer
        model = {"model_name": trainer.base_model, "max_context_length": trainer.max_tokens}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    @router.post("/client/config")
    async def client_config(request: Request) -> dict[str, Any]:
        await body.json(request)
        most = _tenant(request).quotas.requests
        return {"proto_compress_fwdbwd": True, "sample_max_concurrent_requests": min(2000, most)}

    @router.post("/client/dynamic_config")
    async def dynamic_config(request: Request) -> dict[str, Any]:
        await body.json(request)
        return {"sample_cancel_enabled": True}

    @router.post("/telemetry")
    async def telemetry(request: Request) -> dict[str, Any]:
        await body.json(request)  # nothing is kept of it
        return {"status": "accepted"}

    @router.post("/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        asked, _ = await body.read(request, SessionBody)
        session_id = service.create_session(_tenant(request), asked.user_metadata)
        return {"session_id": session_id, "type": "create_session"}

    @router.post("/session_heartbeat")
    async def heartbeat(request: Request) -> dict[str, Any]:
        asked, _ = await body.read(request, SessionId)
        service.session(asked.session_id, _tenant(request))
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session_id}/finish")
    async def finish(request: Request, session_id: str) -> dict[str, Any]:
        await body.json(request)
        service.finish_session(session_id, _tenant(request))
        return {}

    @router.get("/sessions")
    async def sessions(request: Request) -> dict[str, Any]:
        name = _tenant(request).name
        owned = [key for key, record in service.store.sessions.items() if record["tenant"] == name]
        return {"sessions": _page(request, owned)[0]}

    @router.get("/sessions/{session_id}")
    async def session(request: Request, session_id: str) -> dict[str, Any]:
        service.session(session_id, _tenant(request))
        runs = [run.run_id for run in list(service.store.runs.values()) if run.session_id == session_id]
        samplers = [key for key in list(service.store.samplers) if key.startswith(f"{session_id}:sample:")]
        return {
            "training_run_ids": runs,
            "sampler_ids": samplers,
            "user_metadata": service.store.sessions[session_id]["metadata"],
        }


def _add_commands(router: APIRouter, service: TrainingService, body: _BodyReader) -> None:

    @router.post("/create_model")
    async def create_model(request: Request) -> dict[str, Any]:
        return service.create_model(_tenant(request), *await body.read(request, CreateModelBody))

    @router.post("/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        asked, _ = await body.read(request, ModelId)
        run = service.info(_tenant(request), asked.model_id)
        trainer = service.trainer
        return {
            "type": "get_info",
            "model_id": run.run_id,
            "model_data": {
                "arch": type(trainer.engine.lm).__name__,
                "model_name": trainer.base_model,
                "tokenizer_id": trainer.tokenizer_id,
            },
            "is_lora": True,
            "lora_rank": run.rank,
            "model_name": trainer.base_model,
        }

    @router.post("/unload_model")
    async def unload_model(request: Request) -> dict[str, Any]:
        asked, raw = await body.read(request, ModelId)
        return service.unload(_tenant(request), asked.model_id, raw)

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        raw = await body.whole(request)
        return service.forward_backward(_tenant(request), read_forward_backward(raw), raw)

    def add_command(name: str, kind: type[CommandBody], accept: Callable[..., dict[str, Any]]) -> None:
        @router.post(f"/{name}")
        async def command(request: Request) -> dict[str, Any]:
            """Accept a command of a model; a faulty one takes its place in the order, if it tells which."""
            content, raw = await body.json(request)
            placed = read_body(content, CommandBody)
            try:
                read = read_body(content, kind)
            except UserError as error:
                return service.reject(_tenant(request), placed, name, raw, error)
            return accept(_tenant(request), read, raw)

    add_command("optim_step", OptimStepBody, service.optim_step)
    add_command("save_weights", SaveBody, service.save)
    add_command("save_weights_for_sampler", SaveForSamplerBody, service.save)
    add_command("save_weights_external", SaveExternalBody, service.save)

    @router.post("/load_weights")
    async def load_weights(request: Request) -> dict[str, Any]:
        return service.load(_tenant(request), *await body.read(request, LoadBody))


def _add_sampling(router: APIRouter, service: TrainingService, body: _BodyReader) -> None:

    @router.post("/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, Any]:
        asked, _ = await body.read(request, SamplerBody)
        sampler_id = service.create_sampler(_tenant(request), asked)
        return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}

    @router.post("/join_sampling_session")
    async def join_sampling_session(request: Request) -> dict[str, Any]:
        asked, _ = await body.read(request, SamplerId)
        service.sampler(_tenant(request), asked.sampling_session_id)
        return {"client_counter": 1 + secrets.randbelow(10**9), "type": "join_sampling_session"}

    @router.get("/samplers/{sampler_id}")
    async def sampler(request: Request, sampler_id: str) -> dict[str, Any]:
        path = service.sampler(_tenant(request), sampler_id)
        return {"sampler_id": sampler_id, "base_model": service.trainer.base_model, "model_path": path}

    @router.post("/asample")
    async def asample(request: Request) -> dict[str, Any]:
        return service.sample(_tenant(request), *await body.read(request, SampleBody))


def _add_results(
    router: APIRouter, service: TrainingService, body: _BodyReader, activity: Activity, poll_seconds: float
) -> None:

    @router.post("/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        asked, _ = await body.read(request, RetrieveBody)
        future = service.futures.find(asked.request_id, _tenant(request))
        end = time.monotonic() + poll_seconds
        while not future.done.is_set() and not activity.stops and (left := end - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(future.done.wait(), min(1.0, left))
        if isinstance(future.answer, bytes):
            return Response(future.answer, media_type="application/x-protobuf")
        waiting = {"type": "try_again", "request_id": future.request_id, "queue_state": "active"}
        return JSONResponse(waiting if future.answer is None else future.answer)

    @router.post("/cancel_future")
    async def cancel_future(request: Request) -> dict[str, Any]:
        asked, _ = await body.read(request, RetrieveBody)
        future = service.futures.find(asked.request_id, _tenant(request))
        if future.finished is None and future.cancel is not None:
            future.cancel()
        return {}


def _add_checkpoints(router: APIRouter, service: TrainingService, body: _BodyReader) -> None:
    store = service.store

    def owned(request: Request, run_id: str, checkpoint_id: str) -> Checkpoint:
        checkpoint = store.find(f"tinker://{run_id}/{checkpoint_id}", _tenant(request).name)
        if checkpoint.tenant is None:
            raise UserError(f"{checkpoint.path} is an adapter of the server's own: only its operator removes it")
        return checkpoint

    @router.get("/training_runs")
    async def training_runs(request: Request) -> dict[str, Any]:
        name = _tenant(request).name
        runs = sorted((run for run in list(store.runs.values()) if run.tenant == name), key=lambda run: -run.created)
        page, cursor = _page(request, runs)
        return {"training_runs": [_shown_run(service, run) for run in page], "cursor": cursor}

    @router.get("/training_runs/{run_id}")
    async def training_run(request: Request, run_id: str) -> dict[str, Any]:
        return _shown_run(service, service.info(_tenant(request), run_id))

    @router.get("/training_runs/{run_id}/checkpoints")
    async def checkpoints_of_run(request: Request, run_id: str) -> dict[str, Any]:
        saved = [entry for entry in store.checkpoints(_tenant(request).name, run_id) if not entry.unnamed]
        return {"checkpoints": [_shown_checkpoint(entry) for entry in saved]}

    @router.get("/checkpoints")
    async def checkpoints(request: Request) -> dict[str, Any]:
        saved = [entry for entry in store.checkpoints(_tenant(request).name) if not entry.unnamed]
        page, cursor = _page(request, saved)
        return {"checkpoints": [_shown_checkpoint(entry) for entry in page], "cursor": cursor}

    @router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}")
    async def delete_checkpoint(request: Request, run_id: str, checkpoint_id: str) -> dict[str, Any]:
        await service.on_engine(store.delete, owned(request, run_id, checkpoint_id).path)
        return {}

    @router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")
    async def set_ttl(request: Request, run_id: str, kind: str, name: str) -> dict[str, Any]:
        asked, _ = await body.read(request, TtlBody)
        checkpoint = owned(request, run_id, f"{kind}/{name}")
        await service.on_engine(store.set_ttl, checkpoint, asked.ttl_seconds)
        return {}


def _add_files(router: APIRouter, service: TrainingService, body: _BodyReader) -> None:
    """Files of checkpoints, in both directions."""
    store = service.store
    secret = secrets.token_bytes(32)

    def signature(place: str) -> str:
        return hmac.new(secret, place.encode(), hashlib.sha256).hexdigest()

    @router.post("/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        asked, _ = await body.read(request, PathBody)
        checkpoint = store.find(asked.tinker_path, _tenant(request).name)
        return {"base_model": service.trainer.base_model, "is_lora": True, "lora_rank": checkpoint.rank}

    @router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
    async def external_weights_urls(request: Request, run_id: str, kind: str, name: str) -> dict[str, Any]:
        checkpoint = store.find(f"tinker://{run_id}/{kind}/{name}", _tenant(request).name)
        expires = int(time.time()) + _FILE_SECONDS
        urls = {}
        for file in sorted(checkpoint.folder.iterdir()):
            if not file.is_file() or file.name == META_FILE:  # a folder of the operator's may have others in it
                continue
            place = f"{expires}/{run_id}/{kind}/{name}/{file.name}"
            urls[file.name] = f"{request.base_url}{_FILES[1:]}{signature(place)}/{quote(place)}"
        return {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()}

    @router.get("/files/{signed}/{expires}/{run_id}/{kind}/{name}/{file}")
    async def download(signed: str, expires: str, run_id: str, kind: str, name: str, file: str) -> FileResponse:
        expected = signature(f"{expires}/{run_id}/{kind}/{name}/{file}")
        if not hmac.compare_digest(signed.encode(), expected.encode()) or int(expires) < time.time():
            raise HTTPException(403, "a signed path is valid as it was given and for an hour, this one is not")
        checkpoint = next((c for c in store.checkpoints(run_id=run_id) if (c.kind, c.name) == (kind, name)), None)
        if checkpoint is None:
            raise UnknownObject("the checkpoint was deleted, or has expired")
        return FileResponse(checkpoint.folder / file)

    @router.post("/import_adapter/{name}")
    async def import_adapter(request: Request, name: str) -> dict[str, Any]:
        write = _unzipped(await body.whole(request), most=body.most)
        return {"path": await service.import_adapter(_tenant(request), name, write)}


def _unzipped(content: bytes, *, most: int) -> Callable[[Path], None]:
    """A function that writes the two files of an adapter of a ZIP archive into a new folder.

    Raises:
        UserError: for another body.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        members = {Path(member.filename).name: member for member in archive.infolist() if not member.is_dir()}
        if any(name not in members for name in _ADAPTER_FILES):
            raise UserError(f"the archive must have {' and '.join(_ADAPTER_FILES)}, it lacks one: zip a folder of peft")
        files = {}
        for name in _ADAPTER_FILES:
            if members[name].file_size > most:
                raise UserError(f"a file of an adapter has at most {most} bytes, {name} has more: lower the rank")
            with archive.open(members[name]) as file:
                files[name] = file.read(most)
    except _ZIP_ERRORS as error:
        raise UserError("the body must be a ZIP archive of an adapter's folder, got another: zip it") from error

    def write(folder: Path) -> None:
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)

    return write


def _shown_run(service: TrainingService, run: Run) -> dict[str, Any]:
    saved = [entry for entry in service.store.checkpoints(run_id=run.run_id) if not entry.unnamed]
    newest = {entry.kind: _shown_checkpoint(entry) for entry in saved}
    return {
        "training_run_id": run.run_id,
        "base_model": service.trainer.base_model,
        "model_owner": run.tenant,
        "is_lora": True,
        "lora_rank": run.rank,
        "last_request_time": _time(run.last_request or run.created),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": {key: str(value) for key, value in run.metadata.items()} or None,
    }


def _shown_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": KINDS[checkpoint.kind],
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "user_metadata": checkpoint.metadata or None,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(request: Request, items: list[ResultT]) -> tuple[list[ResultT], dict[str, int]]:
    """The items that a query asks for, and where they are."""
    window = {}
    for key, default in (("offset", "0"), ("limit", "100")):
        text = request.query_params.get(key, default)
        if not text.isdecimal() or len(text) > 9:
            raise UserError(f"{key} must be a number of 0 or more, got {text[:100]!r}: correct it")
        window[key] = int(text)
    return items[window["offset"] :][: window["limit"]], {**window, "total_count": len(items)}


def _tenant(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


def _error(status: int, message: str) -> JSONResponse:
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    category = "server" if status >= 500 else "user"
    return JSONResponse({"error": message, "category": category}, status, headers)
