"""Starts, stops and resumes runs; the form of their settings; signals."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from hybrid_rlhf.board.processes.form import check_form, form_fields
from hybrid_rlhf.board.routes.answers import answer
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.serving.web import KnownKeys, StrictBody


class FormQuery(KnownKeys):
    """The query of GET /api/form."""

    command: str = Field(max_length=40)
    algorithm: str | None = Field(None, min_length=1, max_length=40)


class FormBody(StrictBody):
    """The values of a form, by dotted key."""

    command: str = Field(max_length=40)
    values: dict[str, Any]


class EmptyBody(StrictBody):
    """A request without values."""


def routes(workspace: BoardWorkspace) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter(prefix="/api")
    folders = workspace.folders
    training = workspace.training

    @router.get("/form")
    def form(query: Annotated[FormQuery, Query()]) -> Response:
        fields = form_fields(query.command, query.algorithm)
        for field in fields:
            if field["key"] == "output_dir":
                field["default"] = folders.shown(training.unused_folder(query.command))
        return answer({"fields": fields})

    @router.post("/form/check")
    def check(body: FormBody) -> Response:
        return answer(check_form(body.command, body.values, folders.require_new))

    @router.post("/form/estimate")
    def estimate(body: FormBody) -> Response:
        return answer(workspace.estimates.of_form(body.command, body.values))

    @router.get("/presets")
    def listed_presets() -> Response:
        return answer(workspace.presets.all())

    @router.get("/presets/{preset}")
    def preset_values(preset: str) -> Response:
        return answer(workspace.presets.values(preset))

    @router.post("/runs")
    def start(body: FormBody) -> Response:
        return answer({"run": training.start(body.command, body.values)})

    @router.post("/runs/{run_id}/stop")
    def stop(run_id: str, body: EmptyBody) -> Response:
        training.stop(folders.get(run_id))
        return answer({})

    @router.post("/runs/{run_id}/resume")
    def resume(run_id: str, body: EmptyBody) -> Response:
        training.resume(folders.get(run_id))
        return answer({})

    @router.get("/runs/{run_id}/signals")
    def signals(run_id: str) -> Response:
        return answer([dataclasses.asdict(signal) for signal in workspace.signals(folders.get(run_id))])

    return router
