"""Calls of many environments at once, each with a limit of time: coroutines in one event loop, functions in threads.

The event loop stays, because what an environment opened in one call it uses in the next.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_rlhf.algorithms.rewards.background import Background, Late
from hybrid_rlhf.algorithms.user_code import told

THREADS = 32
"""Functions that run at once."""
MOST_HANGING_CALLS = 16
"""Each keeps a thread, and perhaps a core, for good."""
_CANCELLED_SECONDS = 0.5
"""In which a coroutine that was cancelled at the time-out has ended."""


@dataclass(frozen=True)
class Failed:
    """In place of what a call should have returned."""

    reason: str


class Calls:
    """Makes calls and waits for them."""

    def __init__(self, *, timeout_seconds: float, device: torch.device) -> None:
        self._timeout_seconds, self._device = timeout_seconds, device
        self._hanging: list[Background[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each of some calls of one kind returns, or Failed."""
        self._hanging = [call for call in self._hanging if not call.has_ended()]
        if len(self._hanging) >= MOST_HANGING_CALLS:
            return [Failed(f"{len(self._hanging)} earlier calls still hang")] * len(calls)
        at_once = len(calls) if any(map(inspect.iscoroutinefunction, calls)) else THREADS
        begun: list[Callable[[], Any]] = []
        found = []
        for place in range(len(calls)):
            begun += [self._begin(call) for call in calls[len(begun) : place + at_once]]
            found.append(begun[place]())
        return found

    def _begin(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Start a call; calling what is returned waits for it."""
        if inspect.iscoroutinefunction(call):
            loop = self._running_loop()
            future = asyncio.run_coroutine_threadsafe(self._caught(call), loop)
            return lambda: self._await(future, loop)
        background = Background(lambda: _caught(call), device=self._device)

        def wait() -> Any:
            try:
                return background.result(self._timeout_seconds)
            except Late:
                self._hanging.append(background)
                return self._late

        return wait

    async def _caught(self, call: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_seconds) as limit:
                return await call()
        except BaseException as error:  # noqa: BLE001 - in its own loop it can only be the environment's
            return self._late if limit.expired() else Failed(told(error))

    def _await(self, future: Future[Any], loop: asyncio.AbstractEventLoop) -> Any:
        given_up = loop is not self._loop  # its other calls have had as long as the one that it was given up for
        try:
            return future.result(0.0 if given_up else self._timeout_seconds + _CANCELLED_SECONDS)
        except TimeoutError:
            self._loop = None  # it is blocked, or the coroutine does not let itself be cancelled
            return self._late

    @property
    def _late(self) -> Failed:
        return Failed(f"it took longer than {self._timeout_seconds:g} s")

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return self._loop


def _caught(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 - in a thread of its own it can only be the environment's
        return Failed(told(error))
