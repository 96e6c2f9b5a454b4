"""Python functions as reward components: `f(prompts, completions, **columns) -> list[float | None]`.

Coroutine functions work as well. A function that names `images` gets the images of each prompt. The signature is that
of TRL's reward functions; completions are always text. Those of verl and OpenRLHF are called by foreign.py.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.loop.user_code import describe_error, import_named
from hybrid_rlhf.rl.rewards.components import RESERVED, CompletionTexts, ComponentScores, RewardBatch, RewardComponent
from hybrid_rlhf.rl.rewards.foreign import as_reward
from hybrid_rlhf.runtime.background import BackgroundCall, CallTimeout, retry_delay_seconds
from hybrid_rlhf.runtime.observability.logs import logger

if TYPE_CHECKING:
    from PIL import Image

RewardFunction = Callable[..., Any]
MAX_HANGING_CALLS = 4
"""Limit on calls that never return, because each occupies a thread."""
_CANCELLED_SECONDS = 0.5
"""Time in which a coroutine ends after it is cancelled at the time-out."""


class FunctionReward(RewardComponent):
    """Calls a function once per rollout with all of this rank's rows, and again if the call fails.

    A call that hangs is not retried, because a second call would probably hang as well. The next rollout calls the
    function again, since a completion may have caused the hang, until too many calls hang.
    """

    def __init__(self, config: RewardComponentConfig, *, device: torch.device) -> None:
        """Import the function.

        Raises:
            UserError: when it cannot be imported, or does not take the columns.
        """
        super().__init__(config)
        self._function = load_function(config.function or "")
        parameters = inspect.signature(self._function).parameters
        self.reads_images = "images" in parameters
        self.columns = [
            parameter.name
            for parameter in parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.name not in RESERVED
        ]
        self._timeout_seconds = config.timeout_seconds
        self._retries = config.most_retries
        self._device = device
        self._hanging: list[BackgroundCall[ComponentScores]] = []

    def begin(self, batch: RewardBatch) -> Callable[[], ComponentScores]:
        """Start the call in a thread."""
        return self._begin(batch.texts)

    def score(self, texts: CompletionTexts) -> ComponentScores:
        """Scores of completions that do not belong to a rollout."""
        return self._begin(texts)()

    def _begin(self, texts: CompletionTexts) -> Callable[[], ComponentScores]:
        self._hanging = [call for call in self._hanging if not call.has_ended()]
        if len(self._hanging) >= MAX_HANGING_CALLS:
            scores = ComponentScores.failed(len(texts), f"{len(self._hanging)} earlier calls of it still hang")
            return lambda: scores
        call = self._start(texts)
        return lambda: self._finish(call, texts)

    def _start(self, texts: CompletionTexts) -> BackgroundCall[ComponentScores]:
        return BackgroundCall(lambda: self._call(texts), device=self._device)

    def _finish(self, call: BackgroundCall[ComponentScores], texts: CompletionTexts) -> ComponentScores:
        """Wait for a call, and repeat it while rows fail."""
        scores = self._wait(call, len(texts))
        tries = 1
        while scores.failures and tries <= self._retries and call not in self._hanging:
            time.sleep(retry_delay_seconds(tries))
            call = self._start(texts)
            tries += 1
            scores = scores.filled_from(self._wait(call, len(texts)))
        return scores.with_tries(tries)

    def _call(self, texts: CompletionTexts) -> ComponentScores:
        if not len(texts):
            return ComponentScores([])
        try:
            # Copies, so that other components and the next attempt do not see changes that the function makes.
            columns = {name: list(values) for name, values in texts.columns.items()}
            if self.reads_images:
                columns["images"] = _decoded(texts)
            values = self._function(prompts=list(texts.prompts), completions=list(texts.completions), **columns)
            if inspect.isawaitable(values):
                values = asyncio.run(self._await(values))
            return ComponentScores.read(values, len(texts))
        except CallTimeout:
            raise
        except BaseException as error:  # noqa: BLE001 - in this thread only the function can raise
            return ComponentScores.failed(len(texts), describe_error(error) + _explanation(error))

    async def _await(self, awaitable: Awaitable[object]) -> object:
        try:
            async with asyncio.timeout(self._timeout_seconds) as limit:
                return await awaitable
        except TimeoutError as error:
            if limit.expired():
                raise CallTimeout from error
            raise

    def _wait(self, call: BackgroundCall[ComponentScores], count: int) -> ComponentScores:
        try:
            return call.result(self._timeout_seconds)
        except CallTimeout:
            if not call.has_ended(_CANCELLED_SECONDS):
                self._hanging.append(call)
            return ComponentScores.failed(count, f"it took longer than {self._timeout_seconds:g} s")


def _decoded(texts: CompletionTexts) -> list[list[Image.Image]]:
    """The images of each completion; those of equal prompts are the same object."""
    read = functools.cache(lambda image: image.image())
    return [[read(image) for image in of_row] for of_row in texts.images or [[] for _ in texts.prompts]]


def _explanation(error: BaseException) -> str:
    """A hint for functions that fail because they expect conversations, as TRL passes for conversational data."""
    is_indexed = isinstance(error, TypeError) and "string indices must be integers" in str(error)
    return "; a completion is its text, not a list of messages: use it without [0]['content']" if is_indexed else ""


def load_function(name: str) -> RewardFunction:
    """The function that `module:function` or `path/to/file.py:function` names.

    Raises:
        UserError: when it cannot be imported, is not callable, or does not take `**columns`.
    """
    function = import_named(name, what="reward.components: function")
    if not callable(function):
        raise UserError(
            f"reward.components: {name} must be a function, got a {type(function).__name__}: check the name"
        )
    foreign = as_reward(function)
    if foreign is not None:
        logger.info("reward function %s: called as %s calls it, by its parameters", name, foreign[1])
        return foreign[0]
    signature = inspect.signature(function)
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        raise UserError(
            f"reward.components: a function takes (prompts, completions, **columns), {name} takes {signature}: "
            "add **columns"
        )
    return function  # type: ignore[no-any-return]
