"""Judgements of people: the next pair, a judgement, a summary, and training on them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from hybrid_rlhf.board.asked import ask_models
from hybrid_rlhf.board.routes.answers import Digest, answer, picture
from hybrid_rlhf.board.routes.chat import ModelPath, SamplingBody
from hybrid_rlhf.board.routes.training import EmptyBody
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sections.training import TrainConfig
from hybrid_rlhf.serving.web import KnownKeys, StrictBody

_PAIRS = "pairs.jsonl"


class PairQuery(KnownKeys):
    """The query of GET /api/preferences/next."""

    run: list[str] = Field(min_length=1, max_length=2)


class JudgementBody(StrictBody):
    """POST /api/preferences."""

    pair: str = Field(max_length=100)
    choice: Literal["left", "right", "equal"]
    who: str = Field(min_length=1, max_length=200)


class ModelsBody(StrictBody):
    """POST /api/preferences/ask."""

    models: list[ModelPath] = Field(min_length=2, max_length=2)
    prompts: str = Field(min_length=1, max_length=4000)
    sampling: SamplingBody = SamplingBody()


class RewardTrainingBody(StrictBody):
    """POST /api/preferences/train."""

    model: str = Field(min_length=1, max_length=4000)
    output_dir: str = Field(min_length=1, max_length=4000)
    options: dict[str, Any] = {}


def routes(workspace: BoardWorkspace) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter(prefix="/api/preferences")
    preferences = workspace.preferences
    folders = workspace.folders

    @router.get("/next")
    def following(query: Annotated[PairQuery, Query()]) -> Response:
        runs = [folders.get(run_id) for run_id in dict.fromkeys(query.run)]
        return answer(preferences.next([workspace.samples(run) for run in runs]))

    @router.post("/ask")
    async def ask(body: ModelsBody) -> Response:
        paths = await asyncio.to_thread(lambda: [workspace.models.path_of(model, "chat") for model in body.models])
        if paths[0] == paths[1]:
            raise UserError(f"two models are compared, got {paths[0]} twice: choose another")
        sampling = SamplingParams(**body.sampling.model_dump())
        return answer(await ask_models(preferences, workspace.chats, paths, body.prompts, sampling))

    @router.post("/undo")
    def undo(body: EmptyBody) -> Response:
        return answer(preferences.undo())

    @router.post("")
    def judge(body: JudgementBody) -> Response:
        return answer({"count": preferences.judge(body.pair, body.choice, body.who)})

    @router.get("/{pair}/images/{digest}")
    def image(pair: str, digest: Digest) -> Response:
        return picture(preferences.thumbnail(pair, digest))

    @router.get("/summary")
    def summary() -> Response:
        return answer(preferences.summary())

    @router.post("/train")
    def train(body: RewardTrainingBody) -> Response:
        folder = folders.make(body.output_dir)
        pairs = folder / _PAIRS
        values = {**body.options, "model.path": body.model, "data.sources": [str(pairs)]}
        try:
            half = max(1, preferences.write_pairs(pairs) // 2)  # a batch must fit into the pairs that are not held out
            values.setdefault("train.global_batch_size", min(TrainConfig().global_batch_size, half))
            return answer({"run": workspace.training.start("reward", values, folder)})
        except UserError:
            pairs.unlink(missing_ok=True)
            folder.rmdir()
            raise

    return router
