"""A webhook server: what it received, and how it answers."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class WebhookServer:
    """A running server."""

    url: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    delay: threading.Event | None = None
    """Answers are sent once it is set; None: at once."""
    status: int = 200


@contextlib.contextmanager
def webhook_server() -> Iterator[WebhookServer]:
    """A server on this host."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 - the name that the server calls
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.messages.append(json.loads(body))
            if state.delay is not None:
                state.delay.wait(30)
            with contextlib.suppress(OSError):  # the client has left
                self.send_response(state.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, form: str, *words: Any) -> None:
            """No lines on stderr."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    state = WebhookServer(f"http://127.0.0.1:{http.server_address[1]}/hook/s3cret-path")
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
