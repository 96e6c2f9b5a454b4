"""Queue of requests from other threads to a running batch.

Only the thread of the batch uses requests, the KV cache and the device. Other threads add requests, cancellations and
calls here. The batch takes them between two steps, or while it waits for something to decode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from hybrid_rlhf.generation.batching.requests import Request


class Arrivals:
    """Requests, cancellations and calls that the thread of an open batch has not taken yet.

    That thread calls `take` and `take_cancelled`; other threads call the other methods.
    """

    def __init__(self, *, rows: int, max_tokens: int, memory_share: float | None = None) -> None:
        """Begin empty.

        Args:
            rows: maximum number of requests decoded together.
            max_tokens: maximum length of prompt and completion of a request.
            memory_share: largest share of the free memory for the KV cache; none: as in other calls.
        """
        self.rows = rows
        self.max_tokens = max_tokens
        self.memory_share = memory_share
        self._changed = threading.Condition()
        self._requests: list[Request] = []
        self._cancelled: list[Request] = []
        self._calls: list[Callable[[], object]] = []
        self.closed = False
        """True if the batch ends after the present step."""

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests; samples of one prompt are adjacent and have a prompt index that no other prompt has."""
        with self._changed:
            self._requests += requests
            self._changed.notify()

    def has(self, request: Request) -> bool:
        """True if a request has not been taken yet."""
        with self._changed:
            return request in self._requests

    def cancel(self, requests: Collection[Request]) -> None:
        """End requests that have not finished."""
        with self._changed:
            for request in self._requests:
                if request in requests:
                    request.finish_reason = "cancelled"
            self._requests = [request for request in self._requests if request.finish_reason is None]
            self._cancelled += requests

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the thread of the batch; it must not raise."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify()

    def close(self) -> None:
        """End the batch after the present step; unfinished requests are abandoned."""
        with self._changed:
            self.closed = True
            self._changed.notify()

    def take(self, *, wait: bool = False) -> list[Request]:
        """Make the calls that other threads requested, and return the new requests in order of arrival.

        Args:
            wait: block until there is a request; the result is then empty only if the batch was closed.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not wait or self._requests or self._calls or self.closed)
                calls = self._calls
                self._calls = []
                if not calls:
                    requests = self._requests
                    self._requests = []
                    return [] if self.closed else requests
            for call in calls:
                call()

    def take_cancelled(self) -> list[Request]:
        """Return the requests that were cancelled since the last call; some may have finished."""
        with self._changed:
            cancelled = self._cancelled
            self._cancelled = []
            return cancelled
