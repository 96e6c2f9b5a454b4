"""Calls in background threads, and the delay before a failed call is retried.

An executor is not suitable: its threads keep the process alive, and user code may hang.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class CallTimeout(Exception):
    """A call exceeded its time limit."""


class BackgroundCall(Generic[T]):
    """Starts a call immediately; `result` waits for it."""

    def __init__(self, call: Callable[[], T], *, device: torch.device) -> None:
        self._call = call
        self._device = device
        self._error: BaseException | None = None
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, timeout_seconds: float | None = None) -> T:
        """Wait for the call, and return its result.

        Args:
            timeout_seconds: time limit since the start of the call; None: unlimited.

        Raises:
            CallTimeout: if the call has not ended by then. It keeps running: Python cannot stop a thread.
            BaseException: the exception that the call raised.
        """
        left = None if timeout_seconds is None else max(0.0, self._start + timeout_seconds - time.monotonic())
        self._thread.join(left)
        if self._thread.is_alive():
            raise CallTimeout
        if self._error is not None:
            raise self._error
        return self._value

    def has_ended(self, within_seconds: float | None = 0.0) -> bool:
        """Return True if the call has ended, after waiting at most this long; None waits for its end."""
        self._thread.join(within_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread starts on the first GPU
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again by result
            self._error = error


class BackgroundQueue(Generic[T]):
    """Handles items in a thread, one after another; `put` does not wait."""

    def __init__(
        self, handle: Callable[[T], None], *, name: str, on_error: Callable[[Exception], None], limit: int = 10_000
    ) -> None:
        """Start the thread.

        Args:
            handle: called with each item.
            name: name of the thread.
            on_error: called in the thread with the first error of `handle`; later items are discarded.
            limit: number of items that may wait; further ones are discarded.
        """
        self._handle = handle
        self._on_error = on_error
        self._items: queue.Queue[T | None] = queue.Queue(limit)
        self._discarded = 0
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Add an item."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self._discarded += 1

    def close(self, within_seconds: float) -> int:
        """Wait until all items are handled, for a limited time; return the number of unhandled items, which are
        discarded."""
        until = time.monotonic() + within_seconds
        with contextlib.suppress(queue.Full):
            self._items.put(None, timeout=within_seconds)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._is_broken:
            return 0
        left = self._items.qsize() if self._thread.is_alive() else 0
        self._is_broken = True
        return self._discarded + left

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if self._is_broken:
                continue
            try:
                self._handle(item)
            except Exception as error:  # noqa: BLE001 - an error outside of the run must not end it
                self._is_broken = True
                self._on_error(error)


FIRST_DELAY_SECONDS = 0.5
"""Delay before the first retry; doubled before each further one."""
MAX_DELAY_SECONDS = 30.0


def retry_delay_seconds(tries: int) -> float:
    """The delay after this many attempts."""
    return min(FIRST_DELAY_SECONDS * 2.0 ** (tries - 1), MAX_DELAY_SECONDS)
