"""The process of a server: its socket, the batch, signals, and the end.

SIGTERM and SIGINT stop it: it accepts no more connections, finishes the requests that run within a limit, and ends with
exit code 0.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.serving.app import build_app, build_scoring_app
from hybrid_rlhf.serving.scores import ScoreService
from hybrid_rlhf.serving.service import Service


@dataclass(frozen=True)
class LoadedModel:
    """A model that generates."""

    engine: GenerationEngine
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Served:
    """What a server serves: a model that generates, a reward model, or both."""

    model: LoadedModel | None
    scores: ScoreService | None


def serve(
    config: ServeConfig, load: Callable[[], Served], *, api_key: str | None, report: Callable[[str, str], None]
) -> None:
    """Serve models until a signal stops it.

    Args:
        config: the settings.
        load: gives the models; called after the address was taken.
        api_key: what requests must send; none: nothing.
        report: receives the name of the model and the base URL of the API when the server accepts requests.

    Raises:
        UserError: when the address cannot be taken, or one sequence of the longest kind does not fit in memory.
    """
    listener = bound_socket(config.host, config.port)
    served = load()
    service = None if served.model is None else _service(config, served.model)
    created = int(time.time())
    if service is not None:
        app = build_app(service, api_key=api_key, created=created, scores=served.scores)
    else:
        assert served.scores is not None
        app = build_scoring_app(served.scores, api_key=api_key, created=created)

    def close() -> None:
        if service is not None:
            service.batch.close()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        report(config.served_name, f"{url_of(*listener.getsockname()[:2])}/v1")
        yield
        close()

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
        if served.model is not None:
            served.model.engine.close()


def _service(config: ServeConfig, model: LoadedModel) -> Service:
    """The service of a model, whose batch is open."""
    return Service(
        model.engine.open(rows=config.max_batch_rows, max_tokens=config.max_sequence_tokens),
        model.tokenizer,
        name=config.served_name,
        sampling=config.sampling,
        max_queue=config.max_queue,
        adapters=model.engine.adapters,
    )


def url_of(host: str, port: int) -> str:
    """The URL of an address, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


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
