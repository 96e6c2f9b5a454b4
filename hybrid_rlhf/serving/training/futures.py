"""Results that clients poll for, by the id of their request.

The id follows from what is asked (the model and the place of the command in its order, or the sampling session and the
place of the request), so that a request that is sent again finds the first one's result and nothing is done twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.serving.training.store import DiskFull, UnknownObject
from hybrid_rlhf.serving.training.tenants import Tenant

Answer = bytes | Mapping[str, Any]
"""A protobuf message, or an object for JSON."""
_KEPT_SECONDS = 900.0
"""Time after which a finished result is forgotten."""
_KEPT_RESULTS = 2**15
"""Number of results of a key that are kept; beyond it the oldest finished one is forgotten."""


class CommandFailed(Exception):
    """A command has failed through no fault of the client."""


class Gone(Exception):
    """A result no longer exists, or its server was killed: the client sends its request again."""


@dataclass(eq=False)
class Future:
    """The result of one request."""

    request_id: str
    tenant: Tenant
    content: int
    """Hash of what was asked."""
    size: int
    """Bytes that it takes until it has finished."""
    created: float = field(default_factory=time.monotonic)
    finished: float | None = None
    answer: Answer | None = None
    cancel: Callable[[], None] | None = None
    """Ends the work early; None: that is not possible, or not yet."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, answer: Answer) -> None:
        """Set the result; the first one counts. Called on the event loop."""
        if self.finished is None:
            self.answer = answer
            self.finished = time.monotonic()
            self.tenant.requests -= 1
            self.tenant.queued_bytes -= self.size
            self.cancel = None  # it holds the work
            self.done.set()

    def fail(self, message: str, *, by_user: bool) -> None:
        """Set an error as the result."""
        self.finish({"error": message, "category": "user" if by_user else "server"})

    def fail_with(self, error: Exception, name: str) -> None:
        """Set an exception as the result of what has this name. The text of an unexpected one is only in the log, as it
        may contain data of other clients."""
        by_user = isinstance(error, (UserError, UnknownObject))
        text = str(error)
        if not by_user and not isinstance(error, (CommandFailed, DiskFull)):
            logger.error("%s has failed: %s", name, self.request_id, exc_info=error)
            text = f"{name} has failed, the log of the server tells why"
        self.fail(text, by_user=by_user)


class Futures:
    """The results of a server. Used on the event loop only."""

    def __init__(self) -> None:
        self._of_tenant: defaultdict[Tenant, dict[str, Future]] = defaultdict(dict)

    def open(
        self, request_id: str, tenant: Tenant, content: bytes, *, more_bytes: int = 0, is_awaited: bool = False
    ) -> tuple[Future, bool]:
        """The future of a request, and True if it is new.

        Args:
            request_id: its id.
            tenant: who sends it.
            content: what is asked.
            more_bytes: memory that it takes in addition to its content, until it has finished.
            is_awaited: accepted requests wait for it.

        Raises:
            QuotaExceeded: when the key exceeds its quota, unless the request is awaited: those in flight would never
                end.
            UserError: when another request had this id.
        """
        futures = self._of_tenant[tenant]
        _forget(futures)
        known = futures.get(request_id)
        digest = hash(content)
        if known is not None:
            if known.content != digest:
                raise UserError(
                    f"a request that is sent again must be the same, {request_id} has changed: number it anew"
                )
            return known, False
        size = len(content) + more_bytes
        tenant.admit(size, always=is_awaited)
        future = futures[request_id] = Future(request_id, tenant, digest, size)
        return future, True

    def find(self, request_id: str, tenant: Tenant) -> Future:
        """A future by its id.

        Raises:
            Gone: when the key has no such result.
        """
        future = self._of_tenant[tenant].get(request_id)
        if future is None:
            raise Gone(f"the result of {request_id[:200]} is not here, or no longer: send the request again")
        return future


def _forget(futures: dict[str, Future]) -> None:
    """Forget results that finished long ago, and while there are too many also others; the oldest are first."""
    limit = time.monotonic() - _KEPT_SECONDS
    is_full = len(futures) >= _KEPT_RESULTS
    old = takewhile(lambda future: is_full or future.created <= limit, futures.values())
    for future in list(islice(old, _KEPT_RESULTS // 2)):
        if future.finished is not None and (is_full or future.finished < limit):
            del futures[future.request_id]
