"""A long cable: carries Ethernet frames between two interfaces, with a delay and a rate in each direction.

`python tests/support/delay_line.py FIRST SECOND SECONDS BITS_PER_SECOND`, as root in the interfaces' network namespace.
It does what `tc qdisc add ... netem delay ... rate ...` does, for kernels without that module (those of small virtual
machines have none).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque

_ALL_PROTOCOLS = 3
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
"""Frames come and go with what the kernel has left to a network card: checksums, and cutting them to the MTU."""
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
_HEADER_BYTES = 10
_LARGEST_FRAME = 2**17
_LONGEST_QUEUE = 2**28
"""Bytes that wait in one direction; more are lost, as in a switch."""


class Direction:
    """Frames on their way from one interface to the other."""

    def __init__(self, source: socket.socket, target: socket.socket, delay: float, rate: float) -> None:
        self.source = source
        self._target = target
        self._delay = delay
        self._seconds_per_byte = 8 / rate if rate else 0.0
        self._free_at = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    def take(self) -> None:
        """Take the frames that have arrived."""
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = self.source.recv(_LARGEST_FRAME)
                if self._bytes > _LONGEST_QUEUE:
                    continue
                self._free_at = max(now, self._free_at) + (len(frame) - _HEADER_BYTES) * self._seconds_per_byte
                self._waiting.append((self._free_at + self._delay, frame))
                self._bytes += len(frame)

    def give(self) -> float:
        """Send the frames that are due; the seconds until the next one."""
        while self._waiting:
            due, frame = self._waiting[0]
            left = due - time.monotonic()
            if left > 0:
                return left
            self._waiting.popleft()
            self._bytes -= len(frame)
            with contextlib.suppress(OSError):  # the interface is down: the frame is lost
                self._target.send(frame)
        return 1.0


def carry(first: str, second: str, delay: float, rate: float) -> None:
    """Carry frames both ways, without end."""
    one, two = _open(first), _open(second)
    directions = (Direction(one, two, delay, rate), Direction(two, one, delay, rate))
    while True:
        wait = min(direction.give() for direction in directions)
        ready, _, _ = select.select([one, two], [], [], wait)
        for direction in directions:
            if direction.source in ready:
                with contextlib.suppress(OSError):  # the interface is down
                    direction.take()


def _open(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 2**26)
    opened.bind((name, _ALL_PROTOCOLS))
    opened.setblocking(False)
    return opened


if __name__ == "__main__":
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # or frames wait for the processes of the hosts
    carry(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
