"""HTTP servers that answer JSON, in a thread."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any


class _UnixServer(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


class _TcpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextlib.contextmanager
def json_server(
    answer: Callable[[str, str, bytes], tuple[int, Any]], *, unix_socket: str | None = None
) -> Iterator[str]:
    """The URL of a server that answers (method, path, body) with a status and JSON; status 0: it hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = answer(self.command, self.path.partition("?")[0], body)
            if not status:
                return
            data = json.dumps(content).encode()
            with contextlib.suppress(OSError):  # the client has left
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = _answer  # noqa: N815 - the names that http.server calls

        def log_message(self, *words: Any) -> None:
            pass

    server: Any = _TcpServer(("127.0.0.1", 0), Handler) if unix_socket is None else _UnixServer(unix_socket, Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield "http://server" if unix_socket else f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
