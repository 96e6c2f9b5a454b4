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
from typing import Any, NamedTuple

from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.runtime.world import World

_PROMPTS = itertools.count()
"""Indices of prompts in the order in which batches take them."""
_SILENT_SECONDS = 60.0
"""Longest time in which the first rank sends nothing to the others, so that their collective does not time out."""


class Taken(NamedTuple):
    """An entry with a label that a batch took."""

    step: int
    """Number of calls of `take` before."""
    label: str
    drains: bool
    """True if launched steps were delivered before."""


@dataclass(eq=False)
class _Entry:
    """Requests to add, or a call to make."""

    requests: list[Request] = field(default_factory=list)
    call: Callable[[], object] = lambda: None
    drains: bool = False
    label: str | None = None
    """Name in the order; none: it is not recorded."""
    specification: Any = None
    name: str = ""
    """Name among the ranks that share the model."""


class _Choice(NamedTuple):
    """Entries that the batch takes next."""

    entries: list[_Entry]
    drains: bool
    """True if launched steps are to be delivered before."""
    more: bool
    """True if this step takes further entries after them, as the recorded batch did."""


class _Told(NamedTuple):
    """A choice as the first rank broadcasts it."""

    names: list[tuple[str, Any]]
    """Names of the entries, with their specifications."""
    drains: bool
    more: bool


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
        order: Sequence[Taken] = (),
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
            order: result of `take_order` of an earlier batch: entries with a label are taken in the same steps again,
                for which the batch waits; then, as they arrive.
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
        self._unrecorded = 0
        self._choice: _Choice | None = None
        """What this step takes next; none: not decided yet."""
        self._recorded = {step: list(taken) for step, taken in itertools.groupby(order, lambda taken: taken.step)}
        self._left = len(order)
        """Number of entries of the recorded order that were not taken yet."""
        self._steps = 0
        self._order: list[Taken] = []
        self._taken_now = 0
        """Number of entries with a label that the present step has taken."""
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

    def add(self, requests: Sequence[Request], *, label: str | None = None, specification: Any = None) -> None:
        """Add requests; samples of one prompt are adjacent, with the same prompt index.

        Args:
            requests: numbered again when the batch takes them, so that no two prompts have the same index.
            label: name in the order, unique in the batch.
            specification: what makes the same requests on the other ranks that share the model, by `remake`; none:
                their own main threads add them.
        """
        self._append(_Entry(list(requests), label=label, specification=specification))

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
                entry.requests = [request for request in entry.requests if request.finish_reason is None]
            self._cancelled += requests

    def call(self, function: Callable[[], object], *, drains: bool = False, label: str | None = None) -> None:
        """Call a function on the thread of the batch; it must not raise.

        Args:
            function: called between two steps.
            drains: the tokens of all launched steps are delivered before.
            label: name in the order, unique in the batch.
        """
        self._append(_Entry(call=function, drains=drains, label=label))

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
        if self._choice is None:
            start = self._idle_since = time.perf_counter()
            self._choice = self._agreed_choice(wait=wait)
            self._idle_since = None
            self._idle_seconds += time.perf_counter() - start
        return self._choice.drains

    def take(self, *, wait: bool = False) -> list[Request]:
        """Make the calls that other threads requested, and return the new requests in order of arrival.

        Args:
            wait: block until there is a request; the result is then empty only if the batch was closed.
        """
        requests: list[Request] = []
        while True:
            self.choose(wait=wait)
            choice = self._choice
            assert choice is not None
            self._choice = None
            for entry in choice.entries:
                entry.call()
                requests += entry.requests
                for _, samples in itertools.groupby(entry.requests, key=lambda request: request.prompt_index):
                    number = next(_PROMPTS)
                    for request in list(samples):
                        request.prompt_index = number
            if self.closed or not (choice.more or (wait and not requests)):
                self._steps += 1
                self._taken_now = 0
                return [] if self.closed else requests

    def take_cancelled(self) -> list[Request]:
        """Return the requests that were cancelled since the last call; some may have finished."""
        with self._changed:
            cancelled = self._cancelled
            self._cancelled = []
            return cancelled

    def _append(self, entry: _Entry) -> None:
        with self._changed:
            if entry.label is None:
                self._unrecorded += 1
                entry.name = f"unrecorded {self._unrecorded}"
            else:
                entry.name = entry.label
            self._entries.append(entry)
            self._changed.notify()

    def take_order(self) -> list[Taken]:
        """Return the entries with labels that the batch has taken since the last call."""
        with self._changed:
            order = self._order
            self._order = []
            return order

    def _agreed_choice(self, *, wait: bool) -> _Choice:
        """The choice of the first rank of those that share the model."""
        world = self._world
        if world is None or world.size == 1:
            return self._own_choice(wait=wait)
        if world.is_main:
            choice = self._own_choice(wait=wait, timeout=_SILENT_SECONDS)
            names = [(entry.name, entry.specification) for entry in choice.entries]
            world.broadcast_object(_Told(names, choice.drains, choice.more))
            return choice
        names, drains, more = world.broadcast_object(_Told([], False, False))
        return _Choice([self._told_entry(name, specification) for name, specification in names], drains, more)

    def _told_entry(self, name: str, specification: Any) -> _Entry:
        """What the first rank has taken: requests that it specifies, or this rank's entry of the same name."""
        if specification is not None:
            return _Entry(self._remake(specification))
        with self._changed:
            self._changed.wait_for(lambda: any(entry.name == name for entry in self._entries))
            entry = next(entry for entry in self._entries if entry.name == name)
            self._entries.remove(entry)
            return entry

    def _own_choice(self, *, wait: bool, timeout: float | None = None) -> _Choice:
        with self._changed:
            recorded = self._awaited()
            self._changed.wait_for(
                lambda: self.closed or (bool(self._due()) if wait or self._awaited() else True), timeout
            )
            due = self._due()
            gone = set(due)
            self._entries = [entry for entry in self._entries if entry not in gone]
            taken = [Taken(self._steps, entry.label, entry.drains) for entry in due if entry.label is not None]
            self._taken_now += len(taken)
            self._left -= len(taken)
            self._order += taken
            drains = any(entry.drains for entry in due) or any(taken.drains for taken in recorded)
            return _Choice(due, drains, bool(self._awaited()))

    def _awaited(self) -> list[Taken]:
        """What the recorded batch took in this step, and this one has not taken yet."""
        return self._recorded.get(self._steps, [])[self._taken_now :]

    def _due(self) -> list[_Entry]:
        """Entries that may be taken now. Until the end of a recorded order, these are the next ones of the step, which
        may be the condition for others to arrive, and those without a label."""
        if self._left <= 0:
            return list(self._entries)
        by_label = {entry.label: entry for entry in self._entries}
        arrived = itertools.takewhile(lambda taken: taken.label in by_label, self._awaited())
        unlabelled = [entry for entry in self._entries if entry.label is None]
        return unlabelled + [by_label[taken.label] for taken in arrived]
