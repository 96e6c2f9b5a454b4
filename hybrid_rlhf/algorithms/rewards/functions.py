"""A Python function as a part of the reward: `f(prompts, completions, **columns) -> list[float | None]`.

It may be a coroutine function. The shape is that of TRL's reward functions; completions are always text.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hybrid_rlhf.algorithms.rewards.answers import Answers
from hybrid_rlhf.algorithms.rewards.background import Background, Late
from hybrid_rlhf.algorithms.rewards.parts import Ratings, RewardPart, Share
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rewards import RewardPartConfig
from hybrid_rlhf.models.tokenizers import first_line

RewardFunction = Callable[..., Any]


class FunctionPart(RewardPart):
    """Calls a function once a rollout, with all of this rank's rows."""

    def __init__(self, config: RewardPartConfig, *, device: torch.device) -> None:
        """Import the function.

        Raises:
            UserError: when there is no such function, or it does not take the columns.
        """
        super().__init__(config)
        self._function = load_function(config.function or "")
        self._timeout_seconds = config.timeout_seconds
        self._device = device

    def begin(self, share: Share) -> Callable[[], Ratings]:
        """Start the call in a thread of its own."""
        answers = share.answers
        call = Background(lambda: self._call(answers), device=self._device)
        return lambda: self._wait(call, len(answers))

    def _call(self, answers: Answers) -> Ratings:
        if not len(answers):
            return Ratings([])
        try:
            values = self._function(prompts=answers.prompts, completions=answers.completions, **answers.columns)
            if inspect.isawaitable(values):
                values = asyncio.run(self._await(values))
        except Late:
            raise
        except BaseException as error:  # noqa: BLE001 - in this thread it can only be the function's own
            return Ratings.failed(len(answers), _told(error))
        return Ratings.read(values, len(answers))

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
            return Ratings.failed(count, f"it took longer than {self._timeout_seconds:g} s")


def load_function(name: str) -> RewardFunction:
    """The function that `module:function` or `path/to/file.py:function` names.

    Raises:
        UserError: when it cannot be imported, is no function, or does not take `**columns`.
    """
    place, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, attribute)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module's body raises what it likes
        raise UserError(
            f"reward.parts: function {name} cannot be imported ({type(error).__name__}: {first_line(error)}): "
            "check the path and the name"
        ) from error
    if not callable(function):
        raise UserError(f"reward.parts: {name} must be a function, got a {type(function).__name__}: check the name")
    signature = inspect.signature(function)
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        raise UserError(
            f"reward.parts: a function takes (prompts, completions, **columns), {name} takes {signature}: add **columns"
        )
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> ModuleType:
    name = str(path.resolve())
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def _told(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"it raised {type(error).__name__}: {first_line(error)} ({Path(frame.filename).name}:{frame.lineno})"
