"""The application: all routes, the page, and errors as one line of JSON."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from hybrid_rlhf.board.processes.jobs import UnknownJob
from hybrid_rlhf.board.routes import chat, jobs, preferences, runs, samples, training
from hybrid_rlhf.board.routes.access import BoardAccess, require_text
from hybrid_rlhf.board.routes.answers import answer, error_answer
from hybrid_rlhf.board.runs.folders import UnknownRun
from hybrid_rlhf.board.samples.rows import UnknownSample
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.commands.board import BoardConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.web import add_error_answers

STATIC = Path(__file__).parents[1] / "static"
_STATUSES: dict[type[Exception], int] = {
    UnknownRun: 404,
    UnknownSample: 404,
    UnknownJob: 404,
    UserError: 400,
    OSError: 503,
    sqlite3.Error: 503,
}


def build_app(workspace: BoardWorkspace, config: BoardConfig) -> FastAPI:
    """The application.

    Args:
        workspace: state of the board; closed with the application.
        config: settings of the board.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        workspace.open()
        yield
        workspace.close()

    app = FastAPI(
        title="hybrid-rlhf board",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(require_text)],
        lifespan=lifespan,
    )
    add_error_answers(
        app,
        _STATUSES,
        lambda status, text, _: error_answer(text, status),
        internal="internal error, see the log of the board: report it",
    )
    app.add_exception_handler(RequestValidationError, _wrong_request)
    app.add_middleware(BoardAccess, host=config.host, token=config.token)

    @app.get("/")
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")

    @app.get("/health")
    async def health() -> Response:
        return answer({"status": "ok"})

    @app.get("/api/events")
    async def events() -> Response:
        return StreamingResponse(workspace.hub.stream(), media_type="text/event-stream")

    for subject in (runs, samples, jobs, preferences, chat, training):
        app.include_router(subject.routes(workspace))
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app


async def _wrong_request(request: Request, error: Exception) -> Response:
    """An answer with the first rule that a query, a path or a body breaks."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    return error_answer(f"{place}: {first['msg']}, got {str(first.get('input'))[:80]!r}", 400)
