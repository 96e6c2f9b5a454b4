"""Queue of requests from other threads to a running batch.

Only the thread of the batch uses requests, the KV cache and the device. Other threads add requests, cancellations and
calls here. The batch takes them between two steps, or while it waits for something to decode.

Tensor-parallel ranks take the same entries in the same step: the first rank decides, and broadcasts what it takes. The
other ranks have entries with the same names from their own main threads, or receive the requests.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.runtime.world import World

_PROMPTS = itertools.count()
"""Indices of prompts in the order in which batches take them."""
_SILENT_SECONDS = 60.0
"""Longest time in which the first rank sends nothing to the others, so that their collective does not time out."""


@dataclass(eq=False)
class _Entry:
    """Requests to add, or a call to make."""

    requests: list[Request] = field(default_factory=list)
    call: Callable[[], object] = lambda: None
    drains: bool = False
    specification: Any = None
    name: str = ""
    """Name among the ranks that share the model."""


class Arrivals:
    """Requests, cancellations and calls that the thread of an open batch has not taken yet.

    That thread calls `take` and `take_cancelled`; other threads call the other methods.
    """

    def __init__(
        self,
        *,
        rows: int,
        max_tokens: int,
        memory_share: float | None = None,
        records_routes: bool = False,
        world: World | None = None,
        remake: Callable[[Any], list[Request]] = lambda specification: [],
    ) -> None:
        """Begin empty.

        Args:
            rows: maximum number of requests decoded together.
            max_tokens: maximum length of prompt and completion of a request.
            memory_share: largest share of the free memory for the KV cache; none: as in other calls.
            records_routes: requests may record the experts of their tokens.
            world: tensor-parallel ranks that share the model, in a group that only the thread of the batch uses.
            remake: makes requests from the specification of an entry.
        """
        self.rows = rows
        self.max_tokens = max_tokens
        self.memory_share = memory_share
        self.records_routes = records_routes
        self._changed = threading.Condition()
        self._entries: list[_Entry] = []
        self._cancelled: list[Request] = []
        self._world = world
        self._remake = remake
        self._unnamed = 0
        self._chosen: list[_Entry] | None = None
        """Entries that the batch takes next; none: not decided yet."""
        self._idle_seconds = 0.0
        self._idle_since: float | None = None
        """Time when the present wait began; none: the batch does not wait."""
        self.closed = False
        """True if the batch ends after the present step."""

    @property
    def idle_seconds(self) -> float:
        """Time that the batch has waited for entries, up to now."""
        since = self._idle_since
        return self._idle_seconds + (0.0 if since is None else time.perf_counter() - since)

    def add(self, requests: Sequence[Request], *, name: str | None = None, specification: Any = None) -> None:
        """Add requests; samples of one prompt are adjacent, with the same prompt index.

        Args:
            requests: numbered again when the batch takes them, so that no two prompts have the same index.
            name: the same on all ranks that share the model, unique in the batch; none: a number of this rank.
            specification: what makes the same requests on the other ranks that share the model, by `remake`; none:
                their own main threads add them.
        """
        self._append(_Entry(list(requests), specification=specification), name)

    def has(self, request: Request) -> bool:
        """True if a request has not been taken yet."""
        with self._changed:
            return any(request in entry.requests for entry in self._entries)

    def cancel(self, requests: Collection[Request]) -> None:
        """End requests that have not finished."""
        with self._changed:
            for entry in self._entries:
                for request in entry.requests:
                    if request in requests:
                        request.finish_reason = "cancelled"
                entry.requests = [request for request in entry.requests if not request.ended]
            self._cancelled += requests

    def call(self, function: Callable[[], object], *, drains: bool = False, name: str | None = None) -> None:
        """Call a function on the thread of the batch; it must not raise.

        Args:
            function: called between two steps.
            drains: the tokens of all launched steps are delivered before.
            name: as in `add`.
        """
        self._append(_Entry(call=function, drains=drains), name)

    def close(self) -> None:
        """End the batch after the present step; unfinished requests are abandoned."""
        with self._changed:
            self.closed = True
            self._changed.notify()

    def choose(self, *, wait: bool = False) -> bool:
        """Decide what the batch takes in this step; returns True if launched steps are to be delivered before.

        Args:
            wait: block until there are entries, or the batch is closed.
        """
        if self._chosen is None:
            start = self._idle_since = time.perf_counter()
            self._chosen = self._agreed_entries(wait=wait)
            self._idle_since = None
            self._idle_seconds += time.perf_counter() - start
        return any(entry.drains for entry in self._chosen)

    def take(self, *, wait: bool = False) -> list[Request]:
        """Make the calls that other threads requested, and return the new requests in order of arrival.

        Args:
            wait: block until there is a request; the result is then empty only if the batch was closed.
        """
        requests: list[Request] = []
        while True:
            self.choose(wait=wait)
            entries = self._chosen or []
            self._chosen = None
            for entry in entries:
                entry.call()
                requests += entry.requests
                for _, samples in itertools.groupby(entry.requests, key=lambda request: request.prompt_index):
                    number = next(_PROMPTS)
                    for request in list(samples):
                        request.prompt_index = number
            if self.closed or requests or not wait:
                return [] if self.closed else requests

    def take_cancelled(self) -> list[Request]:
        """Return the requests that were cancelled since the last call; some may have finished."""
        with self._changed:
            cancelled = self._cancelled
            self._cancelled = []
            return cancelled

    def _append(self, entry: _Entry, name: str | None) -> None:
        with self._changed:
            self._unnamed += name is None
            entry.name = name or f"unnamed {self._unnamed}"
            self._entries.append(entry)
            self._changed.notify()

    def _agreed_entries(self, *, wait: bool) -> list[_Entry]:
        """Take the entries that the first rank takes, of the ranks that share the model."""
        world = self._world
        if world is None or world.size == 1:
            return self._own_entries(wait=wait)
        entries = self._own_entries(wait=wait, timeout=_SILENT_SECONDS) if world.is_main else []
        taken = world.broadcast_object([(entry.name, entry.specification) for entry in entries])
        return entries or [self._same_entry(name, specification) for name, specification in taken]

    def _same_entry(self, name: str, specification: Any) -> _Entry:
        """Return an entry of the first rank: requests that it specifies, or this rank's entry of the same name."""
        if specification is not None:
            return _Entry(self._remake(specification))
        with self._changed:
            self._changed.wait_for(lambda: any(entry.name == name for entry in self._entries))
            entry = next(entry for entry in self._entries if entry.name == name)
            self._entries.remove(entry)
            return entry

    def _own_entries(self, *, wait: bool, timeout: float | None = None) -> list[_Entry]:
        with self._changed:
            self._changed.wait_for(lambda: self.closed or bool(self._entries) or not wait, timeout)
            entries = self._entries
            self._entries = []
            return entries
