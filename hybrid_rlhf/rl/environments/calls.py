"""Concurrent calls of environments with a time-out: coroutines in one event loop, functions in threads.

The event loop persists between calls, because environments keep connections that belong to it.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hybrid_rlhf.loop.user_code import describe_error
from hybrid_rlhf.runtime.background import BackgroundCall

MAX_HANGING_CALLS = 16
"""Limit on calls that never return, because each occupies a thread."""
_CANCELLED_SECONDS = 0.5
"""Time in which a coroutine ends after it is cancelled at the time-out."""


@dataclass(frozen=True)
class CallFailure:
    """Result of a call that failed."""

    reason: str


class EnvironmentCalls:
    """Makes calls and waits for their results; may be used by several threads."""

    def __init__(self, *, timeout_seconds: float, device: torch.device, threads: int) -> None:
        """Take the time limit of a call, this rank's device, and how many functions run concurrently."""
        self._timeout_seconds = timeout_seconds
        self._device = device
        self._threads = threads
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
        results: list[Any] = [self._late] * len(calls)
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        waiting = deque(enumerate(calls))
        running: dict[int, BackgroundCall[Any]] = {}  # in the order of their starts
        while waiting or running:
            while waiting and len(running) < self._threads:
                place, call = waiting.popleft()
                running[place] = BackgroundCall(partial(_report, call, on_ended, ended, place), device=self._device)
            oldest = next(iter(running))
            try:
                place = ended.get(timeout=running[oldest].seconds_left(self._timeout_seconds))
            except queue.Empty:
                self._hanging.append(running.pop(oldest))
            else:
                if place in running:
                    results[place] = running.pop(place).result()
        return results

    async def _caught(self, call: Callable[[], Any], on_ended: Callable[[], None]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_seconds) as limit:
                return await call()
        except BaseException as error:  # noqa: BLE001 - in this event loop only the environment can raise
            return self._late if limit.expired() else CallFailure(describe_error(error))
        finally:
            on_ended()

    def _await(self, future: Future[Any], loop: asyncio.AbstractEventLoop) -> Any:
        abandoned = loop is not self._loop  # another call of the loop has already waited for a whole time-out
        try:
            return future.result(0.0 if abandoned else self._timeout_seconds + _CANCELLED_SECONDS)
        except TimeoutError:
            self._loop = None  # the loop is blocked, or the coroutine ignores its cancellation
            return self._late

    @property
    def _late(self) -> CallFailure:
        return CallFailure(f"it took longer than {self._timeout_seconds:g} s")

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return self._loop


def _report(call: Callable[[], Any], on_ended: Callable[[], None], ended: queue.SimpleQueue[int], place: int) -> Any:
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 - in this thread only the environment can raise
        return CallFailure(describe_error(error))
    finally:
        on_ended()
        ended.put(place)
