"""Concurrent calls of environments with a time-out and retries: functions in threads, coroutines in an event loop.

Episodes are coroutines of the library's own event loop. Coroutines of a user run in another one, because they may block
it; that loop persists between calls, because environments keep connections that belong to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from hybrid_rlhf.loop.user_code import describe_error
from hybrid_rlhf.runtime.background import BackgroundCall, retry_delay_seconds

T = TypeVar("T")
_Outcome = tuple[Any, bool]
"""Result of an attempt, or CallFailure, and true if it is to be repeated."""
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
        self._late = CallFailure(f"it took longer than {timeout_seconds:g} s")
        self._device = device
        self._slots = asyncio.Semaphore(threads)
        self._retries = retries
        self._hanging: list[BackgroundCall[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the library."""
        self._user_loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def __call__(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of functions and coroutine functions; CallFailure for each that failed."""
        return [future.result() for future in [self.run(self.result(call)) for call in calls]]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine of the library, which may await `result` and must not block."""
        with self._starting:
            if self._loop is None:
                self._loop = _started_loop()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def result(self, call: Callable[[], Any], *, closes: bool = False) -> Any:
        """Result of a function or a coroutine function, or CallFailure. One that `closes` is made in any case, because
        it may end what other calls hang on."""
        self._hanging = [hanging for hanging in self._hanging if not hanging.has_ended()]
        if len(self._hanging) >= MAX_HANGING_CALLS and not closes:
            return CallFailure(f"{len(self._hanging)} earlier calls still hang")
        is_coroutine = inspect.iscoroutinefunction(call)
        attempt = self._in_loop if is_coroutine else self._in_thread
        async with contextlib.nullcontext() if is_coroutine else self._slots:
            for tries in range(1, self._retries + 2):
                result, raised = await attempt(call)
                if not raised:
                    break
                if tries <= self._retries:
                    await asyncio.sleep(retry_delay_seconds(tries))
        if isinstance(result, CallFailure) and tries > 1:
            return CallFailure(f"{result.reason} (try {tries})")
        return result

    async def _in_thread(self, call: Callable[[], Any]) -> _Outcome:
        """Attempt to call a function."""
        ended: Future[_Outcome] = Future()
        thread = BackgroundCall(partial(_attempt, call, ended), device=self._device)
        if await _ends(ended, self._timeout_seconds):
            return ended.result()
        self._hanging.append(thread)
        return self._late, False

    async def _in_loop(self, call: Callable[[], Any]) -> _Outcome:
        """Attempt to call a coroutine function."""
        loop = self._user_loop = self._user_loop or _started_loop()
        ended = asyncio.run_coroutine_threadsafe(self._caught(call), loop)
        if await _ends(ended, self._timeout_seconds + _CANCELLED_SECONDS):
            return ended.result()
        if self._user_loop is loop:
            self._user_loop = None  # it is blocked, or the coroutine ignores its cancellation
        return self._late, False

    async def _caught(self, call: Callable[[], Any]) -> _Outcome:
        try:
            async with asyncio.timeout(self._timeout_seconds) as limit:
                return await call(), False
        except BaseException as error:  # noqa: BLE001 - in this event loop only the environment can raise
            return self._late if limit.expired() else CallFailure(describe_error(error)), True


def _started_loop() -> asyncio.AbstractEventLoop:
    """An event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _attempt(call: Callable[[], Any], ended: Future[_Outcome]) -> None:
    """Call a function; `ended` receives its result, or CallFailure, and true if it raised."""
    try:
        ended.set_result((call(), False))
    except BaseException as error:  # noqa: BLE001 - in this thread only the environment can raise
        ended.set_result((CallFailure(describe_error(error)), True))


async def _ends(future: Future[Any], seconds: float) -> bool:
    """Return True if a future ends within a time."""
    ended, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds)
    return bool(ended)
