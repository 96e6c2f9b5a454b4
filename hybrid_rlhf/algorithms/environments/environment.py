"""What an environment is, and how a config's is found.

The shape is that of Gymnasium (arXiv 2407.17032), in text, without its fifth value: what ended an episode from outside,
the rollout knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from hybrid_rlhf.algorithms.user_code import import_named, told
from hybrid_rlhf.configs.environment import EnvironmentConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.messages import Message
from hybrid_rlhf.runtime.world import World, mistakes_shared

Opening = str | list[Message] | None


class Step(NamedTuple):
    """What followed from a turn of the actor; a plain tuple serves as well."""

    observation: str | None
    """What the actor is told next; not read when the episode is done."""
    reward: float
    """Of this turn."""
    done: bool
    """Whether the episode has come to its own end."""


class Environment(Protocol):
    """One episode: an instance is made for each completion. Either method may be a coroutine function.

    It may have `stop_strings`, a list of texts that end a turn of the actor, such as the end of a tool's call.
    """

    def reset(self, row: Mapping[str, Any]) -> Opening | Awaitable[Opening]:
        """Begin with a row of the data: `prompt`, a list of messages, and its other columns.

        Returns:
            the conversation that the actor answers, or a user's message; None: the row's prompt.
        """

    def step(self, completion: str) -> Step | Awaitable[Step]:
        """Go on with what the actor said, without special tokens."""


@dataclass(frozen=True)
class MakeEnvironment:
    """What makes the instances of a config's class, and what ends a turn of theirs."""

    make: Callable[[], Environment]
    stop_strings: tuple[str, ...] = ()

    def __call__(self) -> Environment:
        """An instance."""
        return self.make()


def load_environment(config: EnvironmentConfig, world: World) -> MakeEnvironment | None:
    """What makes the instances; none where the config names no class. Every rank calls.

    Raises:
        UserError: on every rank, when any cannot import the class, it does not take the options, or what it says of
            itself is wrong.
    """
    if config.path is None:
        return None
    with mistakes_shared(world):
        make = _load(config)
    return make


def _load(config: EnvironmentConfig) -> MakeEnvironment:
    kind: Any = import_named(config.path or "", what="environment.path:")
    if not inspect.isclass(kind):
        raise UserError(f"environment.path names a class, {config.path} is a {type(kind).__name__}: check the name")
    lacking = [name for name in ("reset", "step") if not callable(getattr(kind, name, None))]
    if lacking:
        raise UserError(
            f"an environment has reset(row) and step(completion), {config.path} has no {' and no '.join(lacking)}: "
            "add it"
        )
    try:
        stops = getattr(kind(**config.options), "stop_strings", ())
    except Exception as error:  # noqa: BLE001 - the user's own code
        raise UserError(
            f"environment.path: {config.path} cannot be made with the options {config.options} ({told(error)}): "
            "mend environment.options"
        ) from error
    if not isinstance(stops, (list, tuple)) or not all(isinstance(text, str) and text for text in stops):
        raise UserError(
            f"stop_strings of an environment is a list of texts, none of them empty, {config.path} has {stops!r}: "
            "mend it"
        )
    return MakeEnvironment(cast(Callable[[], Environment], partial(kind, **config.options)), tuple(stops))


def with_instruction(prompt: Sequence[Message], instruction: str) -> list[Message]:
    """A conversation whose last message also says how to answer; not every template has a place for a system's."""
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": f"{last['content']}\n\n{instruction}"}]
