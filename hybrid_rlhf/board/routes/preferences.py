"""Judgements of people: the next pair, a judgement, a summary, and training on them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from hybrid_rlhf.board.routes.answers import answer
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.errors import UserError
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

    @router.post("")
    def judge(body: JudgementBody) -> Response:
        return answer({"count": preferences.judge(body.pair, body.choice, body.who)})

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
            return answer({"run": workspace.training.start_with("reward", folder, values)})
        except UserError:
            pairs.unlink(missing_ok=True)
            folder.rmdir()
            raise

    return router
