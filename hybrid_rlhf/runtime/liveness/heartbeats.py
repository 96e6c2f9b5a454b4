"""Heartbeat channel: plain TCP connections between rank 0 and all other ranks, separate from those of the collectives.

The operating system closes the sockets of a process that dies, even if its main thread is blocked, and TCP keep-alive
fails the connection to a host that vanishes. A connection that ends without an exit notice therefore means that the
rank died; this is detected within 25 seconds, while with NCCL alone the other ranks would wait for the timeout of their
collective. A busy process keeps its connections. Messages are JSON, one per line.
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
_MAX_HANDSHAKE_BYTES = 512
_READY = b"+"
"""Sent to every rank once all are connected. Until a rank has received it, it sends only its handshake."""
_MAX_LINE_BYTES = 2**16
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""Names on Linux: seconds, seconds, tries, milliseconds. Other systems keep their defaults for missing ones."""

Message = dict[str, Any]
_open: weakref.WeakSet[HeartbeatChannel] = weakref.WeakSet()


class _Peer:
    """One connection, read line by line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = b""
        self.has_exited = False
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def lines(self, max_bytes: int) -> list[bytes]:
        """The lines that one read completes; call it if the socket is readable.

        Raises:
            OSError: if the connection has ended or a line is longer than `max_bytes`.
        """
        read = self.socket.recv(max_bytes)
        *lines, self._buffer = (self._buffer + read).split(b"\n")
        if not read or len(self._buffer) > max_bytes:
            raise ConnectionResetError("the connection has ended")
        return lines


class HeartbeatChannel:
    """The connections of this rank: on rank 0 to all other ranks, on other ranks to rank 0."""

    def __init__(self, world: World) -> None:
        """Connect; every rank calls.

        Raises:
            ConnectionError: if a rank does not connect within 30 s.
        """
        self.hosts = {world.rank: socket.gethostname()}
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        if world.size > 1:
            self._connect(world)
        for rank, peer in self._peers.items():
            self._selector.register(peer.socket, selectors.EVENT_READ, rank)
        _open.add(self)

    @property
    def peers(self) -> list[int]:
        """The connected ranks that have not sent an exit notice."""
        return [rank for rank, peer in self._peers.items() if not peer.has_exited]

    def send(self, message: Message) -> None:
        """Send to all peers. Errors are ignored: `receive` reports a peer whose connection has ended."""
        line = json.dumps(message).encode() + b"\n"
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.sendall(line)

    def send_exit_notice(self, message: Message) -> None:
        """Send the last message: peers do not treat the end of this connection as a death."""
        self.send({**message, "exit": True})

    def wake(self) -> None:
        """Interrupt a `receive` that waits in another thread."""
        os.write(self._wake_writer, b".")

    def receive(self, timeout_seconds: float) -> list[tuple[int, Message | None]]:
        """Wait for messages and return them with their senders; None means that the rank died."""
        events: list[tuple[int, Message | None]] = []
        for key, _ in self._selector.select(timeout_seconds):
            if key.fd == self._wake_reader:
                os.read(self._wake_reader, 1)
                continue
            peer = self._peers[key.data]
            try:
                messages = [json.loads(line) for line in peer.lines(_MAX_LINE_BYTES)]
            except OSError:
                self._drop(key.data)
                if not peer.has_exited:
                    events.append((key.data, None))
                continue
            peer.has_exited |= any("exit" in message for message in messages)
            events += [(key.data, message) for message in messages]
        return events

    def close(self) -> None:
        """Close the connections; without an exit notice before it, peers treat this as a death."""
        _open.discard(self)
        for rank in list(self._peers):
            self._drop(rank)
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _drop(self, rank: int) -> None:
        peer = self._peers.pop(rank)
        self._selector.unregister(peer.socket)
        peer.socket.close()

    def _connect(self, world: World) -> None:
        one_host = world.local_size == world.size and bool({"LOCAL_WORLD_SIZE", "LOCAL_SIZE"} & os.environ.keys())
        address = "127.0.0.1" if one_host else os.environ["MASTER_ADDR"]
        if world.is_main:
            token = secrets.token_hex(32)
            with _listener(address, one_host=one_host) as listener:
                world.broadcast_object((listener.getsockname()[1], token, self.hosts[0]))
                self._accept(listener, token, world.size)
        else:
            port, token, self.hosts[0] = world.broadcast_object((0, "", ""))
            connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
            connection.sendall(f"{token} {world.rank} {self.hosts[world.rank]}\n".encode())
            if connection.recv(1) != _READY:
                raise ConnectionError("rank 0 closed the heartbeat channel before all ranks were connected")
            self._peers[0] = _Peer(connection)

    def _accept(self, listener: socket.socket, token: str, size: int) -> None:
        """Accept one connection of every other rank and reject all others."""
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
                        self._authenticate(key.data, selector, token)
            for key in selector.get_map().values():
                if key.fileobj is not listener:
                    key.data.socket.close()
        for peer in self._peers.values():
            peer.socket.sendall(_READY)

    def _authenticate(self, peer: _Peer, selector: selectors.BaseSelector, token: str) -> None:
        """Read the handshake, `token rank host`; close the connection if the token is wrong."""
        try:
            lines = peer.lines(_MAX_HANDSHAKE_BYTES)
        except OSError:
            lines = [b""]
        if not lines:
            return
        selector.unregister(peer.socket)
        received, _, words = lines[0].partition(b" ")
        if not secrets.compare_digest(received, token.encode()):
            peer.socket.close()
            return
        rank, host = words.decode().split(" ")
        self._peers[int(rank)] = peer
        self.hosts[int(rank)] = host


def _listener(address: str, *, one_host: bool) -> socket.socket:
    """A listening socket on an address of this host; on all interfaces if other hosts use another address."""
    family, *_, place = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    if one_host or not ipaddress.ip_address(str(place[0])).is_loopback:
        with contextlib.suppress(OSError):
            return socket.create_server((address, 0), family=family)
    return socket.create_server(("", 0), family=family)


def _close_in_child() -> None:
    """A forked child must not keep its parent's connections open after the parent's death."""
    for channel in _open:
        for peer in channel._peers.values():
            peer.socket.close()


os.register_at_fork(after_in_child=_close_in_child)
