"""A webhook server: what it received, and how it answers."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.servers import json_server


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
    state = WebhookServer("")

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        state.messages.append(json.loads(body))
        if state.delay is not None:
            state.delay.wait(30)
        return state.status, None

    with json_server(answer) as url:
        state.url = f"{url}/hook/s3cret-path"
        yield state
