"""A server in a thread of this process, for as long as something else runs in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from hybrid_rlhf.serving.server import bound_socket

_CLOSING_SECONDS = 1
"""For requests that still run at the end."""


@contextlib.contextmanager
def served_in_background(app: FastAPI) -> Iterator[str]:
    """Serve on 127.0.0.1 and a port that is free; gives the URL."""
    listener = bound_socket("127.0.0.1", 0)
    listener.listen(1024)  # connections wait until the server takes them
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_CLOSING_SECONDS, server_header=False)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
