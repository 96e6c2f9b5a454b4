"""API keys of a server: the tenant of a request, its quotas, and fair queueing among tenants."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from hybrid_rlhf.serving.web import Arriving

ItemT = TypeVar("ItemT")
KEY_START = "tml-"
"""Beginning of every key, which the client requires."""
ONLY_TENANT = "local"
"""Name of the only tenant of a server without keys."""


class QuotaExceeded(Exception):
    """A key has reached its limit of requests in flight; the client tries again."""


@dataclass(frozen=True)
class Quotas:
    """Limits of each key."""

    requests: int
    """Requests without a result."""
    queued_bytes: int
    """Bytes of their bodies, and of the rows that are built from them."""
    models: int
    """Adapters in training."""


@dataclass(eq=False)
class Tenant:
    """One key."""

    name: str
    quotas: Quotas
    requests: int = 0
    queued_bytes: int = 0
    accepted: int = 0
    """Number of requests so far."""
    arriving: Arriving = field(init=False)
    """Its requests that are not answered yet, and their bodies."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a body is read."""

    def __post_init__(self) -> None:
        """Apply the limit of queued bytes to bodies that are still arriving."""
        self.arriving = Arriving(self.quotas.queued_bytes)

    def admit(self, size: int, *, always: bool = False) -> None:
        """Count a request of this many bytes.

        Raises:
            QuotaExceeded: when it exceeds a quota, unless `always` is set.
        """
        quotas = self.quotas
        is_full = self.requests >= quotas.requests or self.queued_bytes + size > max(quotas.queued_bytes, size)
        if is_full and not always:
            raise QuotaExceeded(
                f"key {self.name} has {self.requests} requests of {self.queued_bytes} bytes in flight, at most "
                f"{quotas.requests} of {quotas.queued_bytes} bytes: wait for results"
            )
        self.requests += 1
        self.accepted += 1
        self.queued_bytes += size


class Tenants:
    """All keys."""

    def __init__(self, keys: Mapping[str, str], quotas: Quotas) -> None:
        """Set the keys by the names of their tenants; without keys, any key is accepted, for a single tenant."""
        self.has_keys = bool(keys)
        """True if only these keys are accepted."""
        named = keys or {ONLY_TENANT: KEY_START}
        self._keys = {Tenant(name, quotas): key.encode() for name, key in named.items()}

    def of_key(self, key: str) -> Tenant | None:
        """The tenant of a key; None for an unknown one."""
        is_accepted = hmac.compare_digest if self.has_keys else bytes.startswith
        # all keys are compared, so that the duration reveals nothing
        tenants = [tenant for tenant, known in self._keys.items() if is_accepted(key.encode(), known)]
        return tenants[0] if tenants else None

    def __iter__(self) -> Iterator[Tenant]:
        """All tenants."""
        return iter(self._keys)


class FairShare:
    """Start-time fair queueing (Goyal et al. 1996) among tenants.

    The virtual time of a tenant is the work that was charged to it. `next` picks the active tenant with the lowest
    virtual time. One that becomes active starts at the current virtual time, that of the tenant that was picked last,
    so idle time earns no credit, and work that was done while no other tenant was active is no debt.
    """

    def __init__(self) -> None:
        self._time = 0.0
        self._served: dict[Tenant, float] = {}
        self._waiting: set[Tenant] = set()

    def update(self, waiting: Iterable[Tenant]) -> None:
        """Set the active tenants, those that have work now."""
        now = set(waiting)
        for tenant in now - self._waiting:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._time)
        self._waiting = now

    def next(self, items: Iterable[ItemT], tenant_of: Callable[[ItemT], Tenant]) -> ItemT:
        """The first item of the active tenant with the lowest virtual time."""
        chosen = min(items, key=lambda item: self._served[tenant_of(item)])
        self._time = max(self._time, self._served[tenant_of(chosen)])
        return chosen

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """Advance the virtual time of a tenant by its work."""
        self._served[tenant] += tokens
