"""A call in a thread of its own. Why not an executor: its threads keep a process alive, and user code may hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Late(Exception):
    """A call took longer than it may."""


class Background(Generic[T]):
    """Starts a call at once; `result` waits for it."""

    def __init__(self, call: Callable[[], T], *, device: torch.device) -> None:
        self._call, self._device = call, device
        self._error: BaseException | None = None
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, timeout_seconds: float | None = None) -> T:
        """What the call returned.

        Args:
            timeout_seconds: since the start; none: as long as it takes.

        Raises:
            Late: when it has not ended by then. It goes on in its thread: Python cannot stop one from outside.
            BaseException: whatever the call raised.
        """
        left = None if timeout_seconds is None else max(0.0, self._start + timeout_seconds - time.monotonic())
        self._thread.join(left)
        if self._thread.is_alive():
            raise Late
        if self._error is not None:
            raise self._error
        return self._value

    def has_ended(self, within_seconds: float | None = 0.0) -> bool:
        """Whether the call is over, after waiting that long for it; none: until it is."""
        self._thread.join(within_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread begins on the first GPU
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again by result
            self._error = error
