"""The process of the board: its socket, signals, and shutdown."""

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
from hybrid_rlhf.serving.addresses import bound_socket, url_of

_SHUTDOWN_SECONDS = 3


class BoardServer(uvicorn.Server):
    """Reports when it listens, and at shutdown first closes the event streams, which would never end by themselves."""

    def __init__(self, config: uvicorn.Config, hub: EventHub, report: Callable[[], None]) -> None:
        super().__init__(config)
        self._hub = hub
        self._report = report

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and report it."""
        await super().startup(sockets)
        if self.started:
            self._report()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Close the event streams, and shut down."""
        self._hub.close()
        super().handle_exit(sig, frame)


def run_board(config: BoardConfig, load: Load, report: Callable[[int, str], None]) -> None:
    """Serve the board until SIGTERM or SIGINT.

    Args:
        config: the settings.
        load: returns engine and tokenizer of a model; called at its first chat.
        report: receives the number of runs and the URL when connections are accepted.

    Raises:
        UserError: if a folder is missing or the address cannot be bound.
    """
    workspace = BoardWorkspace(config, load)
    listener = bound_socket(config.host, config.port)
    url = f"{url_of(*listener.getsockname()[:2])}/"

    def started() -> None:
        report(len(workspace.folders.all()), f"{url}{'?token=...' if config.token else ''}")
        if config.open:
            shown = url if config.token is None else f"{url}?token={config.token}"
            threading.Thread(target=webbrowser.open, args=(shown,), daemon=True).start()

    app = build_app(workspace, config)
    settings = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_SECONDS, server_header=False, access_log=False
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises a signal again after it has stopped
    BoardServer(settings, workspace.hub, started).run(sockets=[listener])
