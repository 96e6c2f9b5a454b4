"""Keeps the tensors that were used last, within a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from torch import Tensor

V = TypeVar("V")


class LatestValues(Generic[V]):
    """Values with tensors, by key. Threads may call it."""

    def __init__(self, most_bytes: int, tensors: Callable[[V], Iterable[Tensor]]) -> None:
        """Begin empty; `most_bytes`: maximum bytes of the `tensors` of the values that are kept."""
        self._most_bytes = most_bytes
        self._tensors = tensors
        self._kept: OrderedDict[Hashable, V] = OrderedDict()
        """Least recently used first."""
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, which is made if it is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        value = make()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = value
                self._bytes += self._size(value)
            while self._bytes > self._most_bytes:
                self._bytes -= self._size(self._kept.popitem(last=False)[1])
        return value

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def _size(self, value: V) -> int:
        return sum(tensor.nbytes for tensor in self._tensors(value))
