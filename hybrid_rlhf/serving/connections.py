"""Limits of connections, which anyone has who reaches the port: their number, the time for headers, and the lines that
they cause in the log.

uvicorn counts a connection against its limits only when a request has arrived, and asyncio logs each one that finds no
free descriptor with a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hybrid_rlhf.runtime.descriptors import MOST_DESCRIPTORS, raise_descriptors

HEADER_SECONDS = 30.0
"""Time from the first byte of a request, or the beginning of its connection, to the end of its headers."""
_OTHER_DESCRIPTORS = 256
"""Descriptors for files and what has been accepted but not counted yet."""
BACKLOG = 128
"""Connections that the loop accepts at a time; it logs each one for which there is no descriptor."""
_LINES = 60
_LINE_SECONDS = 60.0
"""Time after which there may be one line more."""
_LINE_CHARACTERS = 4000
"""Largest length of a line, and of its traceback."""


def connections_that_fit() -> int:
    """Raise the limit of descriptors; returns the number of connections that fit."""
    most = raise_descriptors()
    return max(most // 2, most - _OTHER_DESCRIPTORS)


_Protocol: Any = AutoHTTPProtocol


class LimitedProtocol(_Protocol):  # type: ignore[misc]  # httptools' or h11's
    """uvicorn's protocol of a connection. Those without headers in time are closed, and where there are too many, the
    one that has waited longest for a whole request, so that clients which send one are answered."""

    most = MOST_DESCRIPTORS
    """Largest number of connections."""
    accepted: ClassVar[set[LimitedProtocol]]
    """Connections of the server."""
    resting: ClassVar[dict[LimitedProtocol, None]]
    """Those without a whole request, the one that has waited longest first."""
    header_seconds = HEADER_SECONDS
    _refused = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin a connection."""
        if len(self.accepted) >= self.most and not self._make_room():
            self._refused = True
            transport.abort()
            return
        self.accepted.add(self)
        self.resting[self] = None
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, error: Exception | None) -> None:
        """End a connection."""
        self._stop_waiting()
        self._leave()
        if not self._refused:
            super().connection_lost(error)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for a whole request; False if none waits."""
        longest = next(iter(self.resting), None)
        if longest is not None:
            longest._leave()
            longest.transport.abort()
        return longest is not None

    def _leave(self) -> None:
        self.accepted.discard(self)
        self.resting.pop(self, None)

    def on_response_complete(self) -> None:
        """Wait for another request."""
        super().on_response_complete()
        if self in self.accepted and not self._is_asked():
            self.resting[self] = None

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        if self._refused:
            return
        super().data_received(data)
        if self._is_asked() and not self.cycle.more_body:
            self.resting.pop(self, None)
        if self._is_asked():
            self._stop_waiting()
        else:
            self._wait_for_headers()

    def _is_asked(self) -> bool:
        """True while a request is answered, or its body arrives."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_seconds, self._close_unless_asked)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_unless_asked(self) -> None:
        self._timer = None
        if not self._is_asked():
            self.transport.abort()


def limited_protocol(most: int) -> type[LimitedProtocol]:
    """The protocol of a server with at most `most` connections."""
    return type("ServerProtocol", (LimitedProtocol,), {"most": most, "accepted": set(), "resting": {}})


class FewLines(logging.Filter):
    """Passes short records, a number of them at once and then few, so that a flood of requests does not fill a disk;
    the next one that passes tells how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._left = float(_LINES)
        self._time = time.monotonic()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """True for a record that is written."""
        now = time.monotonic()
        self._left = min(_LINES, self._left + (now - self._time) / _LINE_SECONDS)
        self._time = now
        if self._left < 1:
            self._left_out += 1
            return False
        self._left -= 1
        record.msg = record.getMessage()[:_LINE_CHARACTERS]
        record.args = ()
        if self._left_out:
            record.msg += f" ({self._left_out} lines before it were left out)"
            self._left_out = 0
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)[-_LINE_CHARACTERS:]
        return True


def limit_lines(*names: str) -> None:
    """Limit the lines of loggers that requests make write."""
    for name in names:
        target = logging.getLogger(name)
        if not any(isinstance(known, FewLines) for known in target.filters):
            target.addFilter(FewLines())
