"""Runs: the list, a single run, curves, the timeline of steps."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from hybrid_rlhf.board.routes.answers import answer
from hybrid_rlhf.board.runs.folders import RunFolder
from hybrid_rlhf.board.runs.marks import delete_run, read_marks, write_marks
from hybrid_rlhf.board.runs.summary import BOARD_LOG, printed_text
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.names import CONFIG_FILE, HTML_FILE, LOG_FILE, METRICS_FILE
from hybrid_rlhf.runtime.files.reading import open_regular
from hybrid_rlhf.serving.web import KnownKeys, StrictBody

_MOST_RUNS = 50
_MOST_NAMES = 500
_MOST_FILES = 2000
_READABLE = (HTML_FILE, LOG_FILE, BOARD_LOG, CONFIG_FILE, METRICS_FILE)
"""Files of a run that the page links."""
_FILE_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A report is a page that whoever may write to the run's folder has written: it runs no script here."""
_Step = Annotated[int | None, Field(ge=0, lt=2**31)]


class MetricsQuery(KnownKeys):
    """The query of GET /api/metrics."""

    run: list[str] = Field(min_length=1, max_length=_MOST_RUNS)
    name: list[str] = Field([], max_length=_MOST_NAMES)
    after: _Step = None
    points: int = Field(1000, ge=2, le=20_000)


class TimelineQuery(KnownKeys):
    """The query of GET /api/runs/RUN/timeline."""

    first: _Step = Field(None, alias="from")
    last: _Step = Field(None, alias="to")


class MarksBody(StrictBody):
    """The title and notes of a run."""

    title: str = Field("", max_length=200)
    notes: str = Field("", max_length=20_000)


class DeleteBody(StrictBody):
    """The name of the run to delete."""

    name: str = Field(max_length=1000)


def routes(workspace: BoardWorkspace) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter(prefix="/api")
    folders = workspace.folders
    summaries = workspace.summaries

    @router.get("/runs")
    def listed() -> Response:
        return answer([summaries.summary(run) for run in folders.all()])

    @router.get("/folders")
    def shown_folders() -> Response:
        return answer({"folders": list(map(str, folders.roots)), "linked": list(map(str, folders.linked()))})

    @router.get("/runs/{run_id}")
    def one(run_id: str) -> Response:
        run = folders.get(run_id)
        metrics = workspace.metrics(run)
        summary = summaries.summary(run)
        summary["problem"] = summary["problem"] or metrics.problem
        printed, printed_file = printed_text(run.folder)
        files = sorted(entry.name + "/" * entry.is_dir() for entry in run.folder.iterdir())
        return answer(
            {
                **summary,
                "config": summaries.config(run)[0],
                "metric_names": metrics.names(),
                "memory_plan": workspace.memory_plan(run),
                "files": files[:_MOST_FILES],
                "notes": read_marks(run.folder).get("notes", ""),
                "printed": printed,
                "printed_file": printed_file,
            }
        )

    @router.get("/runs/{run_id}/files/{name}")
    def file(run_id: str, name: str) -> Response:
        return _file(folders.get(run_id), name)

    @router.post("/runs/{run_id}/marks")
    def mark(run_id: str, body: MarksBody) -> Response:
        write_marks(folders.get(run_id), title=body.title, notes=body.notes)
        workspace.hub.publish("runs", {})
        return answer({})

    @router.post("/runs/{run_id}/delete")
    def delete(run_id: str, body: DeleteBody) -> Response:
        run = folders.get(run_id)
        inner_runs = [
            inner.name for inner in folders.all() if inner.folder != run.folder and run.folder in inner.folder.parents
        ]
        if inner_runs:
            raise UserError(f"{run.name} contains other runs ({', '.join(inner_runs[:3])}): delete those first")
        if run.folder in folders.roots:
            raise UserError(f"{run.name} is a folder of the board itself: remove it by hand")
        if summaries.summary(run)["state"] == "running":  # also on another host, where the lock may not be visible
            raise UserError(f"a run that is deleted must not be running, {run.name} is running: stop it first")
        delete_run(run, name=body.name)
        workspace.forget(run)
        folders.scan()
        workspace.hub.publish("runs", {})
        return answer({})

    @router.get("/metrics")
    def metrics(query: Annotated[MetricsQuery, Query()]) -> Response:
        chosen = [folders.get(run_id) for run_id in dict.fromkeys(query.run)]
        return answer(
            {
                run.id: workspace.metrics(run).series(query.name, after=query.after, points=query.points)
                for run in chosen
            }
        )

    @router.get("/runs/{run_id}/timeline")
    def timeline(run_id: str, query: Annotated[TimelineQuery, Query()]) -> Response:
        return answer(workspace.metrics(folders.get(run_id)).timeline(query.first, query.last))

    return router


def _file(run: RunFolder, name: str) -> Response:
    """A file of a run as a browser shows it."""
    if name not in _READABLE:
        raise UserError(f"file must be one of {', '.join(_READABLE)}, got {name[:80]!r}: choose one")
    try:
        opened = open_regular(run.folder / name)
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror}): the run may not have written it yet") from None
    kind = "text/html" if name == HTML_FILE else "text/plain"
    return StreamingResponse(opened, media_type=kind, headers={"Content-Security-Policy": _FILE_POLICY})
