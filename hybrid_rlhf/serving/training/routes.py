"""Routes of sessions, models, commands, samples and their results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.admission import Activity
from hybrid_rlhf.serving.training.bodies import (
    BodyT,
    CommandBody,
    CreateModelBody,
    EmptyBody,
    LoadBody,
    ModelId,
    OptimStepBody,
    RetrieveBody,
    SampleBody,
    SamplerBody,
    SamplerId,
    SaveBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SessionBody,
    SessionId,
    read_body,
)
from hybrid_rlhf.serving.training.requests import Sender, body_of, json_object, page, read
from hybrid_rlhf.serving.training.service import TrainingService
from hybrid_rlhf.serving.training.store import JsonObject
from hybrid_rlhf.serving.training.tenants import Tenant
from hybrid_rlhf.serving.web import FiniteJSON


def add_routes(router: APIRouter, service: TrainingService) -> None:
    """Add the routes that the service answers."""

    def post(
        path: str, kind: type[BodyT], answer: Callable[[Tenant, BodyT, bytes], JsonObject], *, writes: bool = False
    ) -> None:
        """Answer JSON bodies of a kind; `writes`: the answer writes a file, for which others do not wait. A faulty
        command takes its place in the order, if it tells which."""

        @router.post(f"/{path}")
        async def route(request: Request, tenant: Sender) -> JsonObject:
            accept = await read(request, lambda content: checked(tenant, content), kind.most_bytes)
            return await asyncio.to_thread(accept) if writes else accept()

        def checked(tenant: Tenant, content: bytes) -> Callable[[], JsonObject]:
            """What answers a body on the event loop."""
            value = json_object(content)
            try:
                body = read_body(value, kind)
            except UserError as error:
                if "seq_id" not in kind.model_fields or value.get("model_id") is None:
                    raise
                return partial(service.reject, tenant, read_body(value, CommandBody), path, content, error)
            return partial(answer, tenant, body, content)

    def client_config(tenant: Tenant, *_: object) -> JsonObject:
        most = min(2000, tenant.quotas.requests)
        return {"proto_compress_fwdbwd": True, "sample_max_concurrent_requests": most}

    def cancel(tenant: Tenant, body: RetrieveBody, _: bytes) -> JsonObject:
        future = service.futures.find(body.request_id, tenant)
        if future.cancel is not None:
            future.cancel()
        return {}

    post("client/config", EmptyBody, client_config)
    post("client/dynamic_config", EmptyBody, lambda *_: {"sample_cancel_enabled": True})
    post("telemetry", EmptyBody, lambda *_: {"status": "accepted"})  # nothing is kept of it
    post("create_session", SessionBody, service.create_session, writes=True)
    post("session_heartbeat", SessionId, service.heartbeat)
    post("create_model", CreateModelBody, service.create_model)
    post("get_info", ModelId, service.info)
    post("unload_model", ModelId, service.unload)
    post("optim_step", OptimStepBody, service.optim_step)
    post("save_weights", SaveBody, service.save)
    post("save_weights_for_sampler", SaveForSamplerBody, service.save)
    post("save_weights_external", SaveExternalBody, service.save)
    post("load_weights", LoadBody, service.load)
    post("create_sampling_session", SamplerBody, service.create_sampler, writes=True)
    post("join_sampling_session", SamplerId, service.join_sampler)
    post("asample", SampleBody, service.sample)
    post("cancel_future", RetrieveBody, cancel)

    @router.post("/forward_backward")
    async def forward_backward(request: Request, tenant: Sender) -> JsonObject:
        accept = await read(request, partial(service.forward_backward, tenant))
        return accept()


def add_views(router: APIRouter, service: TrainingService) -> None:
    """Add the routes that show the server, its sessions and sampling sessions, and the one that ends a session."""

    @router.get("/healthz")
    async def healthz() -> JsonObject:
        return {"status": "ok"}

    @router.get("/get_server_capabilities")
    async def capabilities() -> JsonObject:
        base = service.base
        model = {"model_name": base.base_model, "max_context_length": base.max_tokens}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    @router.get("/sessions")
    async def sessions(request: Request, tenant: Sender) -> JsonObject:
        return {"sessions": page(request, service.sessions.of_tenant(tenant))[0]}

    @router.get("/sessions/{session_id}")
    async def session(tenant: Sender, session_id: str) -> JsonObject:
        return {
            "training_run_ids": service.store.runs_of(session_id),
            "sampler_ids": service.store.samplers_of(session_id),
            "user_metadata": service.sessions.find(session_id, tenant).metadata,
        }

    @router.post("/sessions/{session_id}/finish")
    async def finish(request: Request, tenant: Sender, session_id: str) -> JsonObject:
        await body_of(request, EmptyBody)
        await asyncio.to_thread(service.sessions.finish, session_id, tenant)
        service.worker.sweep_soon()
        return {}

    @router.get("/samplers/{sampler_id}")
    async def sampler(tenant: Sender, sampler_id: str) -> JsonObject:
        path = service.sampler(tenant, sampler_id)
        return {"sampler_id": sampler_id, "base_model": service.base.base_model, "model_path": path}


def add_results(router: APIRouter, service: TrainingService, activity: Activity, poll_seconds: float) -> None:
    """Add the route of results, which waits for one up to a time, or until the server stops."""

    @router.post("/retrieve_future")
    async def retrieve_future(request: Request, tenant: Sender) -> Response:
        body = await body_of(request, RetrieveBody)
        future = service.futures.find(body.request_id, tenant)
        end = time.monotonic() + poll_seconds
        while not future.done.is_set() and not activity.stops and (left := end - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(future.done.wait(), min(1.0, left))
            if await request.is_disconnected():
                break
        if isinstance(future.answer, bytes):
            return Response(future.answer, media_type="application/x-protobuf")
        waiting = {"type": "try_again", "request_id": future.request_id, "queue_state": "active"}
        return FiniteJSON(waiting if future.answer is None else future.answer)
