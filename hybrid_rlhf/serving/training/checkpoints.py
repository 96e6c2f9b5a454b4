"""Routes of runs and checkpoints: lists, deletion, and files in both directions."""

from __future__ import annotations

import hashlib
import hmac
import io
import lzma
import secrets
import time
import zipfile
import zlib
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.training.bodies import PathBody, TtlBody
from hybrid_rlhf.serving.training.requests import Sender, body_of, page, read
from hybrid_rlhf.serving.training.service import TrainingService
from hybrid_rlhf.serving.training.store import KINDS, META_FILE, Checkpoint, JsonObject, Run, UnknownObject
from hybrid_rlhf.serving.training.tenants import Tenant

API = "/api/v1"
FILES = f"{API}/files/"
"""Begin of signed paths, which need no key."""
_FILE_SECONDS = 3600
"""Time for which a signed path is valid."""
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(NotImplementedError, RuntimeError, OSError, EOFError, ValueError),
)
"""What reading an archive raises whose bytes are not in order."""
_ZIP_MEMBER = b"PK\x01\x02"
"""Begin of a member's entry in the directory of an archive."""
_MOST_MEMBERS = 1024
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def add_checkpoints(router: APIRouter, service: TrainingService) -> None:
    """Add the routes of runs and checkpoints."""
    store = service.store

    def owned(tenant: Tenant, run_id: str, checkpoint_id: str) -> Checkpoint:
        checkpoint = store.find(f"tinker://{run_id}/{checkpoint_id}", tenant.name)
        if checkpoint.tenant is None:
            raise UserError(f"{checkpoint.path} is an adapter of the server's own: only its operator removes it")
        return checkpoint

    @router.get("/training_runs")
    async def training_runs(request: Request, tenant: Sender) -> JsonObject:
        runs = [run for run in list(store.runs.values()) if run.tenant == tenant.name]
        runs.sort(key=lambda run: -run.created)
        shown, cursor = page(request, runs)
        return {"training_runs": [_shown_run(service, run) for run in shown], "cursor": cursor}

    @router.get("/training_runs/{run_id}")
    async def training_run(tenant: Sender, run_id: str) -> JsonObject:
        return _shown_run(service, service.run(tenant, run_id))

    @router.get("/training_runs/{run_id}/checkpoints")
    async def checkpoints_of_run(tenant: Sender, run_id: str) -> JsonObject:
        saved = [entry for entry in store.checkpoints(tenant.name, run_id) if not entry.unnamed]
        return {"checkpoints": [_shown_checkpoint(entry) for entry in saved]}

    @router.get("/checkpoints")
    async def checkpoints(request: Request, tenant: Sender) -> JsonObject:
        saved = [entry for entry in store.checkpoints(tenant.name) if not entry.unnamed]
        shown, cursor = page(request, saved)
        return {"checkpoints": [_shown_checkpoint(entry) for entry in shown], "cursor": cursor}

    @router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}")
    async def delete_checkpoint(tenant: Sender, run_id: str, checkpoint_id: str) -> JsonObject:
        await service.worker.on_engine(store.delete, owned(tenant, run_id, checkpoint_id))
        return {}

    @router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")
    async def set_ttl(request: Request, tenant: Sender, run_id: str, kind: str, name: str) -> JsonObject:
        body = await body_of(request, TtlBody)
        checkpoint = owned(tenant, run_id, f"{kind}/{name}")
        await service.worker.on_engine(store.set_ttl, checkpoint, body.ttl_seconds)
        return {}


def add_files(router: APIRouter, service: TrainingService) -> None:
    """Files of checkpoints, in both directions."""
    store = service.store
    secret = secrets.token_bytes(32)

    def signature(place: str) -> str:
        return hmac.new(secret, place.encode(), hashlib.sha256).hexdigest()

    @router.post("/weights_info")
    async def weights_info(request: Request, tenant: Sender) -> JsonObject:
        body = await body_of(request, PathBody)
        checkpoint = store.find(body.tinker_path, tenant.name)
        return {"base_model": service.base.base_model, "is_lora": True, "lora_rank": checkpoint.rank}

    @router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
    async def external_weights_urls(request: Request, tenant: Sender, run_id: str, kind: str, name: str) -> JsonObject:
        checkpoint = store.find(f"tinker://{run_id}/{kind}/{name}", tenant.name)
        expires = int(time.time()) + _FILE_SECONDS
        files = sorted(file.name for file in checkpoint.folder.iterdir() if file.name != META_FILE)
        urls = {}
        # the operator's folder may have other files; these two were read as an adapter, also if they are links
        for file in files if checkpoint.tenant is not None else _ADAPTER_FILES:
            place = f"{expires}/{run_id}/{kind}/{name}/{file}"
            urls[file] = f"{request.base_url}{FILES[1:]}{signature(place)}/{quote(place)}"
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
    async def import_adapter(request: Request, tenant: Sender, name: str) -> JsonObject:
        files = await read(request, partial(_unzipped, most=request.state.max_body_bytes))
        return {"path": await service.worker.on_engine(service.states.import_adapter, tenant, name, files)}


def _unzipped(content: bytes, *, most: int) -> dict[str, bytes]:
    """The two files of an adapter in a ZIP archive of its folder.

    Raises:
        UserError: for another body.
    """
    members_at_most = content.count(_ZIP_MEMBER)
    if members_at_most > _MOST_MEMBERS:
        raise UserError(f"an archive has at most {_MOST_MEMBERS} members, got {members_at_most}: zip the folder alone")
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
    return files


def _shown_run(service: TrainingService, run: Run) -> JsonObject:
    saved = [entry for entry in service.store.checkpoints(run_id=run.run_id) if not entry.unnamed]
    newest = {entry.kind: _shown_checkpoint(entry) for entry in saved}
    return {
        "training_run_id": run.run_id,
        "base_model": service.base.base_model,
        "model_owner": run.tenant,
        "is_lora": True,
        "lora_rank": run.rank,
        "last_request_time": _time(run.last_request or run.created),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": {key: str(value) for key, value in run.metadata.items()} or None,
    }


def _shown_checkpoint(checkpoint: Checkpoint) -> JsonObject:
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
