"""The process of a server: its socket, the batch, signals, and shutdown.

SIGTERM and SIGINT stop it: it refuses further requests, finishes running ones within a time limit, ends the rest with a
last event, and exits with code 0; a second signal ends the wait. If decoding fails permanently, it exits with code 70,
so that a supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from fastapi import FastAPI
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME, TIME_FORMAT, logger
from hybrid_rlhf.serving.admission import Activity, access_log
from hybrid_rlhf.serving.app import Access, build_app, build_scoring_app
from hybrid_rlhf.serving.connections import limit_lines
from hybrid_rlhf.serving.scores import ScoreService
from hybrid_rlhf.serving.service import Service
from hybrid_rlhf.serving.updates import ModelUpdates
from hybrid_rlhf.serving.web import WebServer, bound_socket

FAILED_EXIT_CODE = 70
"""Exit code of a failed server, the same as of a run that its watchdog ends: EX_SOFTWARE of sysexits.h."""
CPU_MEMORY_SHARE = 1 / 8
"""Largest share of a host's free memory for the KV cache; a GPU's memory is available to the server alone."""
_FOLLOW_SECONDS = 5.0
"""Time between two looks at the checkpoints of a run."""
_SWITCH_SECONDS = 0.0005
"""Time for which a thread that reads a body keeps the interpreter while others wait: a step takes it many times."""
_LAST_SECONDS = 5.0
"""Time for clients to receive the last events."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that generates."""

    engine: GenerationEngine
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    load: Callable[[], PreTrainedModel]
    """Loads the model again on the host, to change weights and adapters."""


@dataclass(frozen=True)
class Served:
    """The models of a server: one that generates, a reward model, or both."""

    model: LoadedModel | None
    scores: ScoreService | None


class StoppingServer(WebServer):
    """Answers running requests while it stops; uvicorn closes its socket first, and cuts them off at the end."""

    def __init__(
        self,
        app: FastAPI,
        activity: Activity,
        *,
        seconds: float,
        failed: Callable[[], bool],
        started: Callable[[str], object],
        close: Callable[[], None],
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Prepare the server.

        Args:
            app: the application.
            activity: activity of the application.
            seconds: time limit of requests that run when a signal arrives.
            failed: returns true if nothing can be answered any more.
            started: receives the URL when connections are accepted.
            close: ends the requests that still run.
            beside: what runs on the event loop beside the server, until its end.
        """
        self._beside = beside
        self._task: asyncio.Task[None] | None = None
        super().__init__(app, closing_seconds=1, started=started)
        self._activity = activity
        self._seconds = seconds
        self._failed = failed
        self._close = close
        self._end: float | None = None
        """Time at which running requests are ended."""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        gc.collect()
        gc.freeze()  # a collection would scan all objects of torch and the model, which stay alive
        sys.setswitchinterval(_SWITCH_SECONDS)
        limit_lines(LOGGER_NAME)
        super().run(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse further requests; a second signal ends the running ones."""
        self._end = time.monotonic() + (0 if self._activity.stops else self._seconds)
        self._activity.stops = True

    async def on_tick(self, counter: int) -> bool:
        """Return True to exit; called ten times per second."""
        if self._task is None and self._beside is not None:
            self._task = asyncio.create_task(self._beside())
            self._task.add_done_callback(_log_failure)
        if self._activity.stops and self._task is not None:
            self._task.cancel()
        if self._failed():
            self._activity.stops = True
            self._end = time.monotonic()
        if self._end is not None and (not self._activity.requests or time.monotonic() >= self._end):
            await asyncio.to_thread(self._close)
            last = time.monotonic() + _LAST_SECONDS
            while self._activity.requests and time.monotonic() < last:
                await asyncio.sleep(0.02)
            self.should_exit = True
        return await super().on_tick(counter)


def _show_requests() -> None:
    """Write the access log to stderr."""
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(logging.Formatter("%(asctime)s %(message)s", TIME_FORMAT))
    access_log.addHandler(shown)
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log why what runs beside the server has ended."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a task beside the server has failed, the server runs on without it", exc_info=error)


def serve(
    config: ServeConfig,
    load: Callable[[], Served],
    api_key: str | None,
    *,
    report: Callable[[str], None],
    progress: Callable[[str], None],
) -> bool:
    """Serve models until a signal; return False if decoding has failed.

    Args:
        config: the settings.
        load: returns the models; called after the address is bound.
        api_key: key that requests must send; None requires none.
        report: receives the base URL of the API when the server accepts requests.
        progress: receives a text on the memory that the start reserves.

    Raises:
        UserError: when the address cannot be bound, or a sequence of the maximum length does not fit in memory.
    """
    if config.access_log:
        _show_requests()
    listener = bound_socket(config.host, config.port)
    served = load()
    model = served.model
    created = int(time.time())
    activity = Activity()
    access = Access(config.host, api_key, config.cors_origins)
    service: Service | None = None
    beside = None
    if model is None:
        assert served.scores is not None
        app = build_scoring_app(served.scores, access, created=created, activity=activity)
    else:
        batch = model.engine.open(
            rows=config.max_batch_rows,
            max_tokens=config.max_sequence_tokens,
            memory_share=CPU_MEMORY_SHARE if model.device.type == "cpu" else None,
        )
        progress(
            f"KV cache of {batch.kv_cache_bytes / 2**30:.2f} GiB for up to {batch.rows} completions of up to "
            f"{batch.max_tokens} tokens"
        )
        service = Service(
            batch,
            model.tokenizer,
            name=config.served_name,
            sampling=config.sampling,
            max_queue=config.max_queue,
            adapters=model.engine.adapters,
            allows_lark=config.allow_lark,
            image_reader=model.engine.image_reader,
            max_image_pixels=config.max_image_pixels,
            placeholders=model.engine.maker.banned_ids,
        )
        updates = ModelUpdates(service, model.engine, batch, model.load, adapters_from=config.adapters_from)
        route = None if config.adapters_from is None else updates
        app = build_app(service, access, created=created, activity=activity, scores=served.scores, updates=route)
        if config.follow is not None:
            beside = partial(updates.follow, config.follow, _FOLLOW_SECONDS, progress)

    def failed() -> bool:
        return service is not None and service.failed

    def close() -> None:
        if served.scores is not None:
            served.scores.closed = True
        if service is not None:
            service.batch.close()

    server = StoppingServer(
        app,
        activity,
        seconds=config.shutdown_seconds,
        failed=failed,
        started=lambda url: report(f"{url}/v1"),
        close=close,
        beside=beside,
    )
    try:
        server.run(sockets=[listener])
    finally:
        close()
        if model is not None:
            model.engine.close()
    return not failed()
