"""Interface of an environment, and loading of the class that a config names.

The interface is that of Gymnasium (arXiv 2407.17032) with text and images, without `truncated` and `info`: the rollout
itself truncates episodes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.loop.user_code import describe_error, import_named

Content = str | list[dict[str, Any]]
"""Text, or parts `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}` with an image of Pillow, a path,
bytes, a data URI, or an image of the row."""
Opening = Content | list[Message] | None


class StepResult(NamedTuple):
    """Result of a turn of the actor; a plain tuple works as well."""

    observation: Content | None
    """What the actor reads next; ignored when the episode is done."""
    reward: float
    """Reward of this turn."""
    done: bool
    """True if the episode ends here."""


class Environment(Protocol):
    """One episode: an instance is created for each completion. Both methods may be coroutine functions.

    The class may have `stop_strings`, a list of texts that end a turn of the actor, such as the end of a tool call;
    `shows_images`, true if it shows images to a vision-language model; `tools`, JSON schemas of functions that the
    prompt of `reset` shows; `truncated`, called without arguments if the limits of an episode end it, which returns a
    reward that is added to that of the last turn; and `close`, called when the episode ends.
    """

    def reset(self, row: Mapping[str, Any]) -> Opening | Awaitable[Opening]:
        """Start an episode with a row of the data: `prompt`, a list of messages, its other columns, and where it has
        images `images`, a list of references whose method `image()` returns an image of Pillow.

        Returns:
            the conversation that the actor continues, or a user message; None: the row's prompt.
        """

    def step(self, completion: str) -> StepResult | Awaitable[StepResult]:
        """Process a turn of the actor, given without special tokens."""


@dataclass(frozen=True)
class EnvironmentFactory:
    """Creates instances of the configured class, and has the stop strings of their turns."""

    make: Callable[[], Environment]
    stop_strings: tuple[str, ...] = ()
    shows_images: bool = False
    """True if prompts and observations may have images that the row does not have."""


def read_environment(config: EnvironmentConfig) -> EnvironmentFactory:
    """The factory of the configured class.

    Raises:
        UserError: when it cannot be imported, does not take the options, or has invalid stop strings.
    """
    kind: Any = import_named(config.path or "", what="environment.path:")
    if not inspect.isclass(kind):
        raise UserError(f"environment.path names a class, {config.path} is a {type(kind).__name__}: check the name")
    missing = [name for name in ("reset", "step") if not callable(getattr(kind, name, None))]
    if missing:
        raise UserError(
            f"an environment must have reset(row) and step(completion), {config.path} has no "
            f"{' and no '.join(missing)}: add it"
        )
    for name, parameter in (("reset", "row"), ("step", "completion")):
        try:
            inspect.signature(getattr(kind, name)).bind(None, None)
        except TypeError as error:
            raise UserError(
                f"an environment must have reset(row) and step(completion), {name} of {config.path} takes "
                f"{inspect.signature(getattr(kind, name))}: give it the argument {parameter}"
            ) from error
    try:
        first = kind(**config.options)
        stops, shows_images = getattr(first, "stop_strings", ()), getattr(first, "shows_images", False)
    except UserError as error:
        raise UserError(f"environment.path: {config.path}: {error}") from error
    except Exception as error:  # noqa: BLE001 - the user's own code
        raise UserError(
            f"environment.path: {config.path} cannot be made with the options {config.options} "
            f"({describe_error(error)}): fix environment.options"
        ) from error
    if not isinstance(stops, (list, tuple)) or not all(isinstance(text, str) and text for text in stops):
        raise UserError(
            f"stop_strings of an environment is a list of texts, none of them empty, {config.path} has {stops!r}: "
            "fix it"
        )
    if not isinstance(shows_images, bool):
        raise UserError(f"shows_images of an environment is True or False, {config.path} has {shows_images!r}: fix it")
    make = cast(Callable[[], Environment], partial(kind, **config.options))
    return EnvironmentFactory(make, tuple(stops), shows_images)


def new_rows_file(path: str) -> Path:
    """The path of a file of an environment's rows, from the command line; creates its folder.

    Raises:
        UserError: if the file exists.
    """
    file = Path(path)
    if file.exists():
        raise UserError(f"the file must not exist, {file} does: remove it, or name another")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def read_settings(text: str) -> dict[str, Any]:
    """Settings of an environment's data set, from JSON on the command line.

    Raises:
        UserError: unless it is a JSON object.
    """
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise UserError(f"settings must be a JSON object, got {text!r}: give for example '{{\"level\": 2}}'")
    return settings


def with_instruction(prompt: Sequence[Message], instruction: str) -> list[Message]:
    """A conversation with an instruction in its last message, because not every template has a system message."""
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": f"{last['content']}\n\n{instruction}"}]
