"""Chat with saved models, streamed as server-sent events."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from hybrid_rlhf.board.routes.answers import answer
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.serving.web import StrictBody

ModelPath = Annotated[str, Field(min_length=1, max_length=4000)]


class SamplingBody(StrictBody):
    """Sampling parameters of the answers."""

    temperature: float = 0.7
    top_p: float = 0.95
    max_new_tokens: int = Field(default=256, ge=1, le=4000)
    seed: int | None = Field(default=None, ge=0, lt=2**63)


class BoardChatBody(StrictBody):
    """POST /api/chat."""

    models: list[ModelPath] = Field(min_length=1, max_length=2)
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=1000)
    sampling: SamplingBody = SamplingBody()
    reward: ModelPath | None = None


def routes(workspace: BoardWorkspace) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter(prefix="/api")

    @router.get("/models")
    def models() -> Response:
        return answer(workspace.models.shown())

    @router.post("/chat")
    async def chat(body: BoardChatBody) -> Response:
        paths, reward = await asyncio.to_thread(_paths, workspace, body)
        sampling = SamplingParams(**body.sampling.model_dump())
        events = await workspace.chats.answers(paths, body.messages, sampling, reward)
        lines = (f"data: {json.dumps(event)}\n\n" async for event in events)
        return StreamingResponse(lines, media_type="text/event-stream")

    return router


def _paths(workspace: BoardWorkspace, body: BoardChatBody) -> tuple[list[str], str | None]:
    """Paths of the models and of the reward model. It reads folders, so it must not run on the event loop."""
    models = [workspace.models.path_of(model, "chat") for model in body.models]
    return models, None if body.reward is None else workspace.models.path_of(body.reward, "reward")
