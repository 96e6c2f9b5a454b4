"""Plain TCP connections between rank 0 and the others, apart from those of the collectives.

A process that dies closes its sockets, whatever its main thread waited for; a host that vanishes fails its keep-alives.
Either way the end of a connection without a goodbye is a death, and is known within 25 seconds. NCCL alone would let
the others wait. A process that is merely busy keeps its connections. Messages are JSON, one a line.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import selectors
import socket
import time
import weakref
from typing import Any

from hybrid_rlhf.runtime.world import World

_CONNECT_SECONDS = 30.0
_SEND_SECONDS = 1.0
_LONGEST_HELLO = 512
_WELCOME = b"+"
"""Said to all when all are there: nobody sends before, and nothing but a hello comes with it."""
_LONGEST_LINE = 2**16
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""Linux's names: seconds, seconds, tries, milliseconds. Another system keeps its own values for those it lacks."""

Message = dict[str, Any]
_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class _Peer:
    """One connection, read line by line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._buffer = connection, b""
        self.has_left = False
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def lines(self, longest: int) -> list[bytes]:
        """The whole lines that one read completes; call when there is something to read.

        Raises:
            OSError: when the connection has ended, or its line is too long.
        """
        read = self.socket.recv(longest)
        *lines, self._buffer = (self._buffer + read).split(b"\n")
        if not read or len(self._buffer) > longest:
            raise ConnectionResetError("the connection has ended")
        return lines


class Lifeline:
    """The connections of this rank: to all others on rank 0, else to rank 0. A world of one has none."""

    def __init__(self, world: World) -> None:
        """Connect; every rank calls.

        Raises:
            ConnectionError: when a rank does not come within 30 s.
        """
        self.hosts = {world.rank: socket.gethostname()}
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        if world.size > 1:
            self._connect(world)
        for rank, peer in self._peers.items():
            self._selector.register(peer.socket, selectors.EVENT_READ, rank)
        _open.add(self)

    @property
    def peers(self) -> list[int]:
        """The ranks at the other ends, less those that have said goodbye."""
        return [rank for rank, peer in self._peers.items() if not peer.has_left]

    def send(self, message: Message) -> None:
        """Send to all peers. One that cannot take it is as good as dead; `receive` will say so."""
        line = json.dumps(message).encode() + b"\n"
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.sendall(line)

    def goodbye(self, message: Message) -> None:
        """Send the last message: the end of this process is then no death."""
        self.send({**message, "bye": True})

    def wake(self) -> None:
        """End a `receive` that waits in another thread."""
        os.write(self._waker, b".")

    def receive(self, timeout_seconds: float) -> list[tuple[int, Message | None]]:
        """What has come, by sender, as soon as something has. None: that rank died."""
        events: list[tuple[int, Message | None]] = []
        for key, _ in self._selector.select(timeout_seconds):
            if key.fd == self._woken:
                os.read(self._woken, 1)
                continue
            peer = self._peers[key.data]
            try:
                messages = [json.loads(line) for line in peer.lines(_LONGEST_LINE)]
            except OSError:
                self._drop(key.data)
                if not peer.has_left:
                    events.append((key.data, None))
                continue
            peer.has_left |= any("bye" in message for message in messages)
            events += [(key.data, message) for message in messages]
        return events

    def close(self) -> None:
        """Close the connections; without a goodbye before it, that is a death to the others."""
        _open.discard(self)
        for rank in list(self._peers):
            self._drop(rank)
        self._selector.close()
        os.close(self._woken)
        os.close(self._waker)

    def _drop(self, rank: int) -> None:
        peer = self._peers.pop(rank)
        self._selector.unregister(peer.socket)
        peer.socket.close()

    def _connect(self, world: World) -> None:
        told = world.local_size == world.size and {"LOCAL_WORLD_SIZE", "LOCAL_SIZE"} & os.environ.keys()
        address = "127.0.0.1" if told else os.environ["MASTER_ADDR"]
        if world.is_main:
            token = secrets.token_hex(32)
            with _listener(address, one_host=bool(told)) as listener:
                world.broadcast_object((listener.getsockname()[1], token, self.hosts[0]))
                self._welcome(listener, token, world.size)
        else:
            port, token, self.hosts[0] = world.broadcast_object((0, "", ""))
            connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
            connection.sendall(f"{token} {world.rank} {self.hosts[world.rank]}\n".encode())
            if connection.recv(1) != _WELCOME:
                raise ConnectionError("rank 0 closed the lifeline before it was whole")
            self._peers[0] = _Peer(connection)

    def _welcome(self, listener: socket.socket, token: str, size: int) -> None:
        """Take a connection of every other rank, and of nobody else."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while len(self._peers) < size - 1:
                if time.monotonic() > deadline:
                    missing = sorted({*range(1, size)} - self._peers.keys())
                    raise ConnectionError(f"ranks {missing} did not connect to rank 0 within {_CONNECT_SECONDS:g} s")
                for key, _ in selector.select(1.0):
                    if key.fileobj is listener:
                        peer = _Peer(listener.accept()[0])
                        selector.register(peer.socket, selectors.EVENT_READ, peer)
                    else:
                        self._greet(key.data, selector, token, size)
            for key in selector.get_map().values():
                if key.fileobj is not listener:
                    key.data.socket.close()
        for peer in self._peers.values():
            peer.socket.sendall(_WELCOME)

    def _greet(self, peer: _Peer, selector: selectors.BaseSelector, token: str, size: int) -> None:
        """Read the first line of a connection: `token rank host` of a rank that is awaited, or it is closed."""
        try:
            lines = peer.lines(_LONGEST_HELLO)
        except OSError:
            lines = [b""]
        if not lines:
            return
        selector.unregister(peer.socket)
        given, _, words = lines[0].partition(b" ")
        if not secrets.compare_digest(given, token.encode()):
            peer.socket.close()
            return
        rank, host = words.decode().split(" ")
        self._peers[int(rank)], self.hosts[int(rank)] = peer, host


def _listener(address: str, *, one_host: bool) -> socket.socket:
    """A listening socket on an address of this host; on all of them where the others know the host by another."""
    family, *_, place = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    if one_host or not ipaddress.ip_address(str(place[0])).is_loopback:
        with contextlib.suppress(OSError):
            return socket.create_server((address, 0), family=family)
    return socket.create_server(("", 0), family=family)


def _forget_in_child() -> None:
    """A forked child must not hold its parent's connections open past the parent's death."""
    for lifeline in _open:
        for peer in lifeline._peers.values():
            peer.socket.close()


os.register_at_fork(after_in_child=_forget_in_child)
