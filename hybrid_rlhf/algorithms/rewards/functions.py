"""A Python function as a part of the reward: `f(prompts, completions, **columns) -> list[float | None]`.

It may be a coroutine function. The shape is that of TRL's reward functions; completions are always text.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from hybrid_rlhf.algorithms.rewards.answers import Answers
from hybrid_rlhf.algorithms.rewards.background import Background, Late
from hybrid_rlhf.algorithms.rewards.parts import Ratings, RewardPart, Share
from hybrid_rlhf.algorithms.rewards.waits import wait_seconds
from hybrid_rlhf.algorithms.user_code import import_named, told
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rewards import RewardPartConfig

RewardFunction = Callable[..., Any]
MOST_HANGING_CALLS = 4
"""Each keeps a thread, and perhaps a core, for good."""
_CANCELLED_SECONDS = 0.5
"""In which a coroutine that was cancelled at the time-out has ended."""


class FunctionPart(RewardPart):
    """Calls a function once a rollout, with all of this rank's rows, and again where a call fails.

    A call that hangs is not repeated beside itself: what it waits for would hang a second one too. The next rollout is
    given to the function anew, as it may have been a completion of this one; not once too many calls hang.
    """

    def __init__(self, config: RewardPartConfig, *, device: torch.device) -> None:
        """Import the function.

        Raises:
            UserError: when there is no such function, or it does not take the columns.
        """
        super().__init__(config)
        self._function = load_function(config.function or "")
        self._timeout_seconds = config.timeout_seconds
        self._retries = config.most_retries
        self._device = device
        self._hanging: list[Background[Ratings]] = []

    def begin(self, share: Share) -> Callable[[], Ratings]:
        """Start the call in a thread of its own."""
        answers = share.answers
        self._hanging = [call for call in self._hanging if not call.has_ended()]
        if len(self._hanging) >= MOST_HANGING_CALLS:
            ratings = Ratings.failed(len(answers), f"{len(self._hanging)} earlier calls of it still hang")
            return lambda: ratings
        call = self._start(answers)
        return lambda: self._finish(call, answers)

    def _start(self, answers: Answers) -> Background[Ratings]:
        return Background(lambda: self._call(answers), device=self._device)

    def _finish(self, call: Background[Ratings], answers: Answers) -> Ratings:
        """The ratings of a call, and of those after it where it fails."""
        ratings, tries = self._wait(call, len(answers)), 1
        while ratings.failures and tries <= self._retries and call not in self._hanging:
            time.sleep(wait_seconds(tries))
            call, tries = self._start(answers), tries + 1
            ratings = ratings.mended(self._wait(call, len(answers)))
        return ratings.after(tries)

    def _call(self, answers: Answers) -> Ratings:
        if not len(answers):
            return Ratings([])
        try:
            # Lists of its own: what it does to them is not seen by other parts, nor by the next try.
            columns = {name: list(values) for name, values in answers.columns.items()}
            values = self._function(prompts=list(answers.prompts), completions=list(answers.completions), **columns)
            if inspect.isawaitable(values):
                values = asyncio.run(self._await(values))
            return Ratings.read(values, len(answers))
        except Late:
            raise
        except BaseException as error:  # noqa: BLE001 - in this thread it can only be the function's own
            return Ratings.failed(len(answers), told(error))

    async def _await(self, awaitable: Awaitable[object]) -> object:
        try:
            async with asyncio.timeout(self._timeout_seconds) as limit:
                return await awaitable
        except TimeoutError as error:
            if limit.expired():
                raise Late from error
            raise

    def _wait(self, call: Background[Ratings], count: int) -> Ratings:
        try:
            return call.result(self._timeout_seconds)
        except Late:
            if not call.has_ended(_CANCELLED_SECONDS):
                self._hanging.append(call)
            return Ratings.failed(count, f"it took longer than {self._timeout_seconds:g} s")


def load_function(name: str) -> RewardFunction:
    """The function that `module:function` or `path/to/file.py:function` names.

    Raises:
        UserError: when it cannot be imported, is no function, or does not take `**columns`.
    """
    function = import_named(name, what="reward.parts: function")
    if not callable(function):
        raise UserError(f"reward.parts: {name} must be a function, got a {type(function).__name__}: check the name")
    signature = inspect.signature(function)
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        raise UserError(
            f"reward.parts: a function takes (prompts, completions, **columns), {name} takes {signature}: add **columns"
        )
    return function  # type: ignore[no-any-return]
