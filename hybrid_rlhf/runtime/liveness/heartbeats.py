"""Heartbeat channel: plain TCP connections between rank 0 and all other ranks, separate from those of the collectives.

The operating system closes the sockets of a process that dies, even if its main thread is blocked, and TCP keep-alive
fails the connection to a host that vanishes. A connection that ends without an exit notice therefore means that the
rank died; this is detected within 25 seconds, while with NCCL alone the other ranks would wait for the timeout of their
collective. A busy process keeps its connections. Messages are JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
import weakref
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from hybrid_rlhf.runtime.world import World

_CONNECT_SECONDS = 30.0
_TOKEN_BYTES = 32
_RANK_BYTES = 4
_MAX_MESSAGE_BYTES = 2**16
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""Names on Linux: seconds, seconds, tries, milliseconds. Other systems keep their defaults for missing ones."""

Message = dict[str, Any]
_open: weakref.WeakSet[Connection] = weakref.WeakSet()


class HeartbeatChannel:
    """The connections of this rank: on rank 0 to all other ranks, on other ranks to rank 0."""

    def __init__(self, world: World) -> None:
        """Connect; every rank calls.

        Raises:
            ConnectionError: if a rank does not connect within 30 s.
        """
        self.hosts = dict(enumerate(world.all_gather_objects(socket.gethostname())))
        self._connections: dict[int, Connection] = {}
        self._exited: set[int] = set()
        self._woken, self._wake = Pipe(duplex=False)
        if world.size > 1:
            self._connect(world)

    @property
    def peers(self) -> list[int]:
        """The connected ranks that have not sent an exit notice."""
        return [rank for rank in self._connections if rank not in self._exited]

    def send(self, message: Message) -> None:
        """Send to all peers; one with the key `exit` is an exit notice: they do not treat the end of the connection as
        a death. Errors are ignored: `receive` reports a peer whose connection has ended."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(json.dumps(message).encode())

    def wake(self) -> None:
        """Interrupt a `receive` that waits in another thread."""
        self._wake.send_bytes(b"")

    def receive(self, timeout_seconds: float) -> list[tuple[int, Message | None]]:
        """Wait for messages and return them with their senders; None means that the rank died."""
        events: list[tuple[int, Message | None]] = []
        ready = wait([self._woken, *self._connections.values()], timeout_seconds)
        if self._woken in ready:
            self._woken.recv_bytes()
        for rank, connection in [item for item in self._connections.items() if item[1] in ready]:
            try:
                message = json.loads(connection.recv_bytes(_MAX_MESSAGE_BYTES))
            except (EOFError, OSError):
                self._connections.pop(rank).close()
                if rank not in self._exited:
                    events.append((rank, None))
                continue
            if "exit" in message:
                self._exited.add(rank)
            events.append((rank, message))
        return events

    def close(self) -> None:
        """Close the connections; without an exit notice before it, peers treat this as a death."""
        for connection in (*self._connections.values(), self._woken, self._wake):
            connection.close()

    def _connect(self, world: World) -> None:
        one_host = world.local_size == world.size and bool({"LOCAL_WORLD_SIZE", "LOCAL_SIZE"} & os.environ.keys())
        address = "127.0.0.1" if one_host else os.environ["MASTER_ADDR"]
        if world.is_main:
            token = secrets.token_bytes(_TOKEN_BYTES)
            family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((address if one_host else "", 0), family=family) as listener:
                world.broadcast_object((listener.getsockname()[1], token))
                self._accept(listener, token, world.size)
            if missing := {*range(1, world.size)} - self._connections.keys():
                raise ConnectionError(
                    f"ranks {sorted(missing)} did not connect to rank 0 within {_CONNECT_SECONDS:g} s"
                )
            self.send({})
        else:
            port, token = world.broadcast_object((0, b""))
            opened = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
            opened.sendall(token + world.rank.to_bytes(_RANK_BYTES, "big"))
            self._connections[0] = _connection(opened)
            try:
                self._connections[0].recv_bytes()
            except (EOFError, OSError) as error:
                raise ConnectionError("rank 0 ended before all ranks were connected") from error

    def _accept(self, listener: socket.socket, token: bytes, size: int) -> None:
        """Accept one connection of every other rank, whose first bytes are the token and its rank; close all others."""
        until = time.monotonic() + _CONNECT_SECONDS
        unknown: list[socket.socket] = []
        while len(self._connections) < size - 1 and time.monotonic() < until:
            for ready in wait([listener, *unknown], 1.0):
                if ready is listener:
                    unknown.append(listener.accept()[0])
                    continue
                assert isinstance(ready, socket.socket)
                unknown.remove(ready)
                first = b""
                with contextlib.suppress(OSError):
                    first = ready.recv(_TOKEN_BYTES + _RANK_BYTES)
                if secrets.compare_digest(first[:_TOKEN_BYTES], token):
                    self._connections[int.from_bytes(first[_TOKEN_BYTES:], "big")] = _connection(ready)
                else:
                    ready.close()
        for stranger in unknown:
            stranger.close()


def _connection(opened: socket.socket) -> Connection:
    """A connection for messages, which ends if its other host vanishes, and in a forked child: a child must not keep it
    open after its parent's death."""
    opened.settimeout(None)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection = Connection(opened.detach())
    _open.add(connection)
    return connection


def _close_in_child() -> None:
    for connection in _open:
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
