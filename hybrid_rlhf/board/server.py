"""The process of the board: its socket, signals, and the end."""

from __future__ import annotations

import signal
import socket
import threading
import webbrowser
from collections.abc import Callable
from types import FrameType

import uvicorn

from hybrid_rlhf.board.chat import Load
from hybrid_rlhf.board.events import EventHub
from hybrid_rlhf.board.routes.app import build_app
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.commands.board import BoardConfig
from hybrid_rlhf.configs.errors import UserError

_SHUTDOWN_SECONDS = 3


class BoardServer(uvicorn.Server):
    """Ends the streams of events first, which would never end by themselves."""

    def __init__(self, config: uvicorn.Config, hub: EventHub) -> None:
        super().__init__(config)
        self._hub = hub

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn."""
        self._hub.close()
        super().handle_exit(sig, frame)


def run_board(config: BoardConfig, load: Load, report: Callable[[int, str], None]) -> None:
    """Serve the board until SIGTERM or SIGINT.

    Args:
        config: the settings.
        load: gives engine and tokenizer of a model, when someone chats with it.
        report: receives the number of runs and the URL when requests are answered.

    Raises:
        UserError: if a folder is missing or the address cannot be taken.
    """
    workspace = BoardWorkspace(config, load)
    listener = _listener(config.host, config.port)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def started() -> None:
        report(len(workspace.folders.all()), f"{url}{'?token=...' if config.token else ''}")
        if config.open:
            shown = url if config.token is None else f"{url}?token={config.token}"
            threading.Thread(target=webbrowser.open, args=(shown,), daemon=True).start()

    app = build_app(workspace, config, report=started)
    settings = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_SECONDS, server_header=False, access_log=False
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises a signal again after it has stopped
    BoardServer(settings, workspace.hub).run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
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
