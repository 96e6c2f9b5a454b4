"""Replay, branch and rescore of recorded samples, and the state of these jobs."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from hybrid_rlhf.board.routes.answers import answer
from hybrid_rlhf.board.runs.folders import RunFolder
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.web import StrictBody

_MOST_TEXT = 2_000_000
_Count = Annotated[int, Field(ge=0, lt=2**31)]


class SampleBody(StrictBody):
    """The step and index of a sample."""

    step: _Count
    index: _Count


class RescoreBody(SampleBody):
    """A sample, and the text in place of its completion."""

    completion: str = Field(max_length=_MOST_TEXT)


class BranchBody(SampleBody):
    """A sample, the token to branch from, the first text of the branches, and their number."""

    token: _Count
    text: str | None = Field(None, max_length=_MOST_TEXT)
    samples: int = Field(4, ge=1, le=64)


def routes(workspace: BoardWorkspace) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter(prefix="/api")
    folders = workspace.folders
    jobs = workspace.jobs

    def settings(run: RunFolder, body: SampleBody, **more: Any) -> dict[str, Any]:
        workspace.samples(run).line(body.step, body.index)  # raises for an unknown sample
        return {"path": str(run.folder), "step": body.step, "index": [body.index], **more}

    @router.post("/runs/{run_id}/replay")
    def replay(run_id: str, body: SampleBody) -> Response:
        run = folders.get(run_id)
        return answer({"job": jobs.start(settings(run, body)).id})

    @router.post("/runs/{run_id}/branch")
    def branch(run_id: str, body: BranchBody) -> Response:
        run = folders.get(run_id)
        values = {"token": body.token, "n": body.samples, **({"text": body.text} if body.text else {})}
        return answer({"job": jobs.start(settings(run, body, branch=values)).id})

    @router.post("/runs/{run_id}/rescore")
    async def rescore(run_id: str, body: RescoreBody) -> Response:
        run = folders.get(run_id)
        values = await asyncio.to_thread(settings, run, body, rescore={"completion": body.completion})
        job = jobs.start(values)
        await asyncio.wrap_future(job.ended)
        if job.error is not None:
            raise UserError(job.error)
        return answer({"score": job.result.get("score"), "components": job.result.get("components", {})})

    @router.get("/jobs/{job_id}")
    def job(job_id: str) -> Response:
        return answer(jobs.get(job_id).shown())

    return router
