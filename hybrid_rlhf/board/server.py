"""The process of the board: its socket, signals, and shutdown."""

from __future__ import annotations

import signal
import threading
import webbrowser
from collections.abc import Callable
from types import FrameType

from fastapi import FastAPI

from hybrid_rlhf.board.chat import Chats, Load, LoadScorer
from hybrid_rlhf.board.events import EventHub
from hybrid_rlhf.board.routes.app import build_app
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.commands.board import BoardConfig
from hybrid_rlhf.serving.web import WebServer, bound_socket

_SHUTDOWN_SECONDS = 3


class BoardServer(WebServer):
    """At shutdown first closes the event streams, which would never end by themselves."""

    def __init__(self, app: FastAPI, hub: EventHub, started: Callable[[str], None]) -> None:
        super().__init__(app, closing_seconds=_SHUTDOWN_SECONDS, started=started)
        self._hub = hub

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Close the event streams, and shut down."""
        self._hub.close()
        super().handle_exit(sig, frame)


def run_board(config: BoardConfig, load: Load, load_scorer: LoadScorer, report: Callable[[int, str], None]) -> None:
    """Serve the board until SIGTERM or SIGINT.

    Args:
        config: the settings.
        load: returns engine and tokenizer of a model; called at its first chat.
        load_scorer: returns a reward model; called when its first scores are wanted.
        report: receives the number of runs and the URL when connections are accepted.

    Raises:
        UserError: if a folder is missing or the address cannot be bound.
    """
    workspace = BoardWorkspace(config, Chats(load, load_scorer))
    listener = bound_socket(config.host, config.port)

    def started(url: str) -> None:
        report(len(workspace.folders.all()), f"{url}/{'?token=...' if config.token else ''}")
        if config.open:
            shown = f"{url}/" if config.token is None else f"{url}/?token={config.token}"
            threading.Thread(target=webbrowser.open, args=(shown,), daemon=True).start()

    app = build_app(workspace, config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises a signal again after it has stopped
    BoardServer(app, workspace.hub, started).run(sockets=[listener])
