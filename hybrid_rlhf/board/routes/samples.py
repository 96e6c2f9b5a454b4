"""Samples: pages of rows, a sample with its tokens, prompts, and a prompt across runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import Field

from hybrid_rlhf.board.routes.answers import Digest, answer, picture
from hybrid_rlhf.board.samples.queries import PROMPT_KEY, PromptQuery, SampleQuery
from hybrid_rlhf.board.samples.rows import UnknownSample
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.serving.web import KnownKeys

_Count = Annotated[int, Path(ge=0, lt=2**31)]
_MOST_OF_PROMPT = 500
"""Largest number of samples of a prompt, over all runs."""


class DistributionsQuery(KnownKeys):
    """The query of GET /api/runs/RUN/distributions."""

    step: int | None = Field(None, ge=0, lt=2**31)


def routes(workspace: BoardWorkspace) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter(prefix="/api")
    folders = workspace.folders

    @router.get("/runs/{run_id}/samples")
    def page(run_id: str, query: Annotated[SampleQuery, Query()]) -> Response:
        return answer(workspace.samples(folders.get(run_id)).page(query))

    @router.get("/runs/{run_id}/distributions")
    def distributions(run_id: str, query: Annotated[DistributionsQuery, Query()]) -> Response:
        return answer(workspace.samples(folders.get(run_id)).distributions(query.step))

    @router.get("/runs/{run_id}/samples/{step}/{index}")
    def one(run_id: str, step: _Count, index: _Count) -> Response:
        return answer(workspace.samples(folders.get(run_id)).sample(step, index))

    @router.get("/runs/{run_id}/samples/{step}/{index}/images/{digest}")
    def image(run_id: str, step: _Count, index: _Count, digest: Digest) -> Response:
        return picture(workspace.samples(folders.get(run_id)).thumbnail(step, index, digest))

    @router.get("/runs/{run_id}/prompts")
    def prompts(run_id: str, query: Annotated[PromptQuery, Query()]) -> Response:
        return answer(workspace.samples(folders.get(run_id)).prompts(query))

    @router.get("/prompts/{key}")
    def prompt(key: Annotated[str, Path(pattern=PROMPT_KEY)]) -> Response:
        messages = None
        rows = list[dict[str, object]]()
        for run in folders.all():
            if workspace.summaries.summary(run)["has_samples"] and len(rows) < _MOST_OF_PROMPT:
                prompt_messages, more = workspace.samples(run).of_prompt(key, _MOST_OF_PROMPT - len(rows))
                messages = messages or prompt_messages
                rows = rows + more
        if messages is None:
            raise UnknownSample(f"prompt must be a key of /api/runs/RUN/prompts, got {key}: see there")
        return answer({"prompt": messages, "rows": rows})

    return router
