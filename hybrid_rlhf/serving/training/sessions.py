"""Sessions of clients: their owner, their last activity, and when their data is deleted.

The models of a session are removed from the engine when it has finished or had no activity for some time (worker.py).
Its other data, except for named checkpoints, is deleted `KEPT_SECONDS` after its last heartbeat or command.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Container
from dataclasses import dataclass, field

from hybrid_rlhf.serving.training.futures import Gone
from hybrid_rlhf.serving.training.store import JsonObject, Records, UnknownObject
from hybrid_rlhf.serving.training.tenants import Tenant

KEPT_SECONDS = 7 * 24 * 3600.0
_NOTED_SECONDS = 3600.0


@dataclass(eq=False)
class Session:
    """One client."""

    tenant: str
    metadata: JsonObject | None
    finished: bool = False
    last_seen: float = field(default_factory=time.monotonic)
    noted: float = field(default_factory=time.monotonic)
    """Time of the last activity that is recorded in its file, for a restart."""


class Sessions:
    """The sessions of a server. Used on any thread."""

    def __init__(self, records: Records) -> None:
        """Continue the sessions of the records."""
        self._records = records
        self._by_id = {session_id: Session(**record) for session_id, record in records.items()}
        for session_id, session in self._by_id.items():
            # after a restart a client has an hour to reconnect
            session.last_seen -= min(records.age(session_id), KEPT_SECONDS - _NOTED_SECONDS)

    def create(self, tenant: Tenant, metadata: JsonObject | None) -> str:
        """A new session's id."""
        session_id = f"s{secrets.token_hex(8)}"
        self._begin(session_id, tenant, metadata)
        return session_id

    def _begin(self, session_id: str, tenant: Tenant, metadata: JsonObject | None) -> None:
        self._records.write(session_id, tenant=tenant.name, metadata=metadata)
        self._by_id[session_id] = Session(tenant.name, metadata)

    def of_tenant(self, tenant: Tenant) -> list[str]:
        """Ids of a key's sessions that have not finished."""
        sessions = list(self._by_id.items())
        return [key for key, session in sessions if session.tenant == tenant.name and not session.finished]

    def find(self, session_id: str, tenant: Tenant) -> Session:
        """A session, whose activity is recorded.

        Raises:
            UnknownObject: when the key has no such session.
            Gone: when it has finished.
        """
        session = self._by_id.get(session_id)
        if session is None or session.tenant != tenant.name:
            raise UnknownObject(f"there is no session {session_id[:100]} of this key: create one")
        if session.finished:
            raise Gone(f"session {session_id} has finished: create another")
        self.see(session_id, tenant)
        return session

    def see(self, session_id: str, tenant: Tenant) -> None:
        """Record activity of a session. A session that was deleted is created again, for its named checkpoints."""
        session = self._by_id.get(session_id)
        if session is None:
            self._begin(session_id, tenant, None)
            return
        session.last_seen = time.monotonic()
        if session.last_seen - session.noted > _NOTED_SECONDS:
            session.noted = session.last_seen
            self._records.touch(session_id)

    def finish(self, session_id: str, tenant: Tenant) -> None:
        """End a session; its data is deleted later.

        Raises:
            UnknownObject: when the key has no such session.
        """
        with contextlib.suppress(Gone):
            session = self.find(session_id, tenant)
            session.finished = True
            self._records.write(session_id, tenant=session.tenant, metadata=session.metadata, finished=True)

    def is_silent(self, session_id: str, seconds: float) -> bool:
        """True if a session has finished, had no activity for some time, or does not exist."""
        session = self._by_id.get(session_id)
        return session is None or session.finished or time.monotonic() - session.last_seen > seconds

    def forget(self, needed: Container[str]) -> list[str]:
        """Forget expired sessions, except needed ones; return their ids. Their records remain until their data is
        deleted, so that a server that is killed in between deletes it later."""
        limit = time.monotonic() - KEPT_SECONDS
        known = list(self._by_id.items())
        over = [key for key, session in known if session.last_seen < limit and key not in needed]
        for session_id in over:
            del self._by_id[session_id]
        return over
