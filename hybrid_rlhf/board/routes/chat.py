"""Chat with saved models, streamed as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from hybrid_rlhf.board.routes.answers import answer
from hybrid_rlhf.board.runs.folders import RunFolder, UnknownRun
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sampling import SamplingParams

_Path = Annotated[str, Field(min_length=1, max_length=4000)]


class SamplingBody(BaseModel):
    """How answers are sampled."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    temperature: float = 0.7
    top_p: float = 0.95
    max_new_tokens: int = Field(default=256, ge=1, le=4000)
    seed: int | None = Field(default=None, ge=0, lt=2**63)


class BoardChatBody(BaseModel):
    """POST /api/chat."""

    model_config = ConfigDict(strict=True, extra="forbid")

    models: list[_Path] = Field(min_length=1, max_length=2)
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=1000)
    sampling: SamplingBody = SamplingBody()
    reward: _Path | None = None


def routes(workspace: BoardWorkspace) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter(prefix="/api")

    @router.get("/models")
    def models() -> Response:
        return answer([{"path": str(path), "name": _name(workspace, str(path))} for path in workspace.folders.models()])

    @router.post("/chat")
    async def chat(body: BoardChatBody) -> Response:
        paths = [_model_of(workspace, model) for model in body.models]
        sampling = SamplingParams(**body.sampling.model_dump())
        events = await workspace.chats.answers(paths, body.messages, sampling, body.reward)
        return StreamingResponse(_lines(events), media_type="text/event-stream")

    return router


def _model_of(workspace: BoardWorkspace, name: str) -> str:
    """The model that a path or the id of a run names.

    Raises:
        UserError: if the run has saved none.
    """
    try:
        run = workspace.folders.get(name)
    except UnknownRun:
        return name
    found = saved_model(run)
    if found is None:
        raise UserError(f"models must have been saved, run {run.name} has no model yet: wait for its end")
    return found


def saved_model(run: RunFolder) -> str | None:
    """The folder of the model that a run has saved."""
    folders = (run.folder / "actor", run.folder)
    return next((str(folder) for folder in folders if (folder / "config.json").is_file()), None)


def _name(workspace: BoardWorkspace, path: str) -> str:
    roots = [str(root) for root in workspace.folders.roots if path.startswith(f"{root}/")]
    return path.removeprefix(f"{roots[0]}/") if roots else path


async def _lines(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    async for event in events:
        yield f"data: {json.dumps(event)}\n\n"
