"""The process of a server: its socket, the batch, signals, and the end.

SIGTERM and SIGINT stop it: it accepts no more connections, finishes the requests that run within a limit, and ends with
exit code 0.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.serving.app import build_app
from hybrid_rlhf.serving.scores import ScoreService
from hybrid_rlhf.serving.service import Service


@dataclass(frozen=True)
class LoadedModel:
    """What a server serves."""

    engine: GenerationEngine
    tokenizer: PreTrainedTokenizerBase
    adapters: Mapping[str, GenerationEngine] = field(default_factory=dict)
    """Of the model with an adapter merged in, by the adapter's name."""


def serve(
    config: ServeConfig,
    load: Callable[[], LoadedModel],
    *,
    api_key: str | None,
    report: Callable[[str, str], None],
    load_scores: Callable[[], ScoreService] | None = None,
) -> None:
    """Serve a model until a signal stops it.

    Args:
        config: the settings.
        load: gives engines and tokenizer; called after the address was taken.
        api_key: what requests must send; none: nothing.
        report: receives the name of the model and the base URL of the API when the server accepts requests.
        load_scores: gives the reward model; none: there is none.

    Raises:
        UserError: when the address cannot be taken, or one sequence of the longest kind does not fit in memory.
    """
    listener = bound_socket(config.host, config.port)
    loaded = load()
    engines = {"": loaded.engine, **loaded.adapters}
    scores = None if load_scores is None else load_scores()
    batches = {
        name: engine.open(rows=config.max_batch_rows, max_tokens=config.max_sequence_tokens)
        for name, engine in engines.items()
    }
    service = Service(
        batches.pop(""),
        loaded.tokenizer,
        name=config.model_name or config.path.rstrip("/"),
        sampling=config.sampling,
        max_queue=config.max_queue,
        adapters=batches,
    )

    def close() -> None:
        for each in (service, *service.adapters.values()):
            each.batch.close()

    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        report(service.name, f"http://{shown}:{port}/v1")
        yield
        close()

    app = build_app(service, api_key=api_key, created=int(time.time()), scores=scores)
    app.router.lifespan_context = lifespan
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            timeout_graceful_shutdown=config.shutdown_seconds,
            server_header=False,
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises a signal again after it has stopped
    try:
        server.run(sockets=[listener])
    finally:
        close()
        for engine in engines.values():
            engine.close()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket with the address, which does not listen yet: until the model is loaded, connections are refused.

    Raises:
        UserError: when the address cannot be taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(
            f"host and port must be an address that is free here, got {host}:{port} ({error.strerror}): choose another"
        ) from error
    return listener
