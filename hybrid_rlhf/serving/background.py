"""A server in a thread of this process, for the duration of a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from hybrid_rlhf.serving.addresses import bound_socket, url_of

_CLOSING_SECONDS = 1
"""Time for running requests at the end."""


@contextlib.contextmanager
def served_in_background(app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Context that serves on an address and yields its URL. Port 0 selects a free port.

    Raises:
        UserError: when the address cannot be bound.
    """
    listener = bound_socket(host, port)
    listener.listen(1024)  # connections wait until the server takes them
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_CLOSING_SECONDS, server_header=False)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server", daemon=True)
    thread.start()
    try:
        yield url_of(host, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
