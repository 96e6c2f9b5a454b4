"""Concurrent calls of environments with a time-out and retries: coroutines in one event loop, functions in threads.

The event loop persists between calls, because environments keep connections that belong to it.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hybrid_rlhf.loop.user_code import describe_error
from hybrid_rlhf.runtime.background import BackgroundCall, retry_delay_seconds

MAX_HANGING_CALLS = 16
"""Limit on calls that never return, because each occupies a thread."""
_CANCELLED_SECONDS = 0.5
"""Time in which a coroutine ends after it is cancelled at the time-out."""


@dataclass(frozen=True)
class CallFailure:
    """Result of a call that failed."""

    reason: str

    @classmethod
    def after(cls, reason: str, tries: int) -> CallFailure:
        """The failure of the last of several attempts."""
        return cls(reason if tries == 1 else f"{reason} (try {tries})")


class EnvironmentCalls:
    """Makes calls and waits for their results; may be used by several threads."""

    def __init__(self, *, timeout_seconds: float, device: torch.device, threads: int, retries: int = 0) -> None:
        """Take the settings of calls.

        Args:
            timeout_seconds: time limit of an attempt.
            device: this rank's device.
            threads: number of functions that run concurrently.
            retries: attempts after the first of a call that raises, and of a coroutine that exceeds its time. A
                function that does is not called again: it still runs.
        """
        self._timeout_seconds = timeout_seconds
        self._device = device
        self._threads = threads
        self._retries = retries
        self._hanging: list[BackgroundCall[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def __call__(self, calls: Sequence[Callable[[], Any]], *, on_ended: Callable[[], None] = lambda: None) -> list[Any]:
        """Results of calls, all coroutine functions or all plain functions; CallFailure for each that failed.

        `on_ended` is called at the end of each call, in the thread of the call.
        """
        self._hanging = [call for call in self._hanging if not call.has_ended()]
        if len(self._hanging) >= MAX_HANGING_CALLS:
            return [CallFailure(f"{len(self._hanging)} earlier calls still hang")] * len(calls)
        if not any(map(inspect.iscoroutinefunction, calls)):
            return self._in_threads(calls, on_ended)
        loop = self._running_loop()
        futures = [asyncio.run_coroutine_threadsafe(self._caught(call, on_ended), loop) for call in calls]
        return [self._await(future, loop) for future in futures]

    def _in_threads(self, calls: Sequence[Callable[[], Any]], on_ended: Callable[[], None]) -> list[Any]:
        """Results of functions; the next one starts when any has ended or exceeded its time."""
        results: list[Any] = [None] * len(calls)
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        waiting = deque(enumerate(calls))
        running: dict[int, tuple[_Attempts, BackgroundCall[Any]]] = {}
        while waiting or running:
            while waiting and len(running) < self._threads:
                place, call = waiting.popleft()
                attempts = _Attempts(call, retries=self._retries, timeout_seconds=self._timeout_seconds)
                report = partial(_report, attempts, on_ended, ended, place)
                running[place] = (attempts, BackgroundCall(report, device=self._device))
            first = min(running, key=lambda place: running[place][0].until)
            try:
                place = ended.get(timeout=max(0.0, running[first][0].until - time.monotonic()))
            except queue.Empty:
                attempts, thread = running[first]
                if attempts.until <= time.monotonic():  # else it has begun another attempt
                    del running[first]
                    results[first] = self._late(attempts.tries)
                    self._hanging.append(thread)
            else:
                if place in running:
                    results[place] = running.pop(place)[1].result()
        return results

    async def _caught(self, call: Callable[[], Any], on_ended: Callable[[], None]) -> Any:
        try:
            for tries in range(1, self._retries + 2):
                try:
                    async with asyncio.timeout(self._timeout_seconds) as limit:
                        return await call()
                except BaseException as error:  # noqa: BLE001 - in this event loop only the environment can raise
                    late = self._late(tries)
                    failure = late if limit.expired() else CallFailure.after(describe_error(error), tries)
                if tries <= self._retries:
                    await asyncio.sleep(retry_delay_seconds(tries))
            return failure
        finally:
            on_ended()

    def _await(self, future: Future[Any], loop: asyncio.AbstractEventLoop) -> Any:
        abandoned = loop is not self._loop  # another call of the loop has already waited for a whole time-out
        try:
            return future.result(0.0 if abandoned else self._longest_seconds)
        except TimeoutError:
            self._loop = None  # the loop is blocked, or the coroutine ignores its cancellation
            return self._late(1)

    @property
    def _longest_seconds(self) -> float:
        """Time in which all attempts of a coroutine end, with the delays between them."""
        delays = sum(map(retry_delay_seconds, range(1, self._retries + 1)))
        return delays + (self._retries + 1) * (self._timeout_seconds + _CANCELLED_SECONDS)

    def _late(self, tries: int) -> CallFailure:
        return CallFailure.after(f"it took longer than {self._timeout_seconds:g} s", tries)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return self._loop


class _Attempts:
    """A function that is called again when it raises."""

    def __init__(self, call: Callable[[], Any], *, retries: int, timeout_seconds: float) -> None:
        self._call = call
        self._retries = retries
        self._timeout_seconds = timeout_seconds
        self.tries = 1
        self.until = time.monotonic() + timeout_seconds
        """End of the time of the present attempt."""

    def __call__(self) -> Any:
        """Result of the first attempt that does not raise, or CallFailure."""
        while True:
            try:
                return self._call()
            except BaseException as error:  # noqa: BLE001 - in this thread only the environment can raise
                failure = CallFailure.after(describe_error(error), self.tries)
            if self.tries > self._retries:
                return failure
            delay = retry_delay_seconds(self.tries)
            self.until = time.monotonic() + delay + self._timeout_seconds
            self.tries += 1
            time.sleep(delay)


def _report(call: Callable[[], Any], on_ended: Callable[[], None], ended: queue.SimpleQueue[int], place: int) -> Any:
    try:
        return call()
    finally:
        on_ended()
        ended.put(place)
