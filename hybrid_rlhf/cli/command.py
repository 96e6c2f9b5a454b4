"""Commands as functions of their settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hybrid_rlhf.runtime.command_line import parse_config, user_errors

ConfigT = TypeVar("ConfigT")


def command(
    config_type: type[ConfigT], *, positional: str | Sequence[str] = (), is_rank: bool = False
) -> Callable[[Callable[[ConfigT], None]], Callable[..., None]]:
    """Decorator that makes a function of a config the function `main` of a command.

    It takes the words of the command line (none: those of the process) and `prog`, the name that --help shows, parses
    them, and ends with exit code 2 and one line for a user's mistake. Commands import torch after parsing.

    Args:
        config_type: the settings.
        positional: keys whose values the first words may give without their names.
        is_rank: true if the command may be one of several ranks, which end with their launcher.
    """

    def decorate(run: Callable[[ConfigT], None]) -> Callable[..., None]:
        def parse_and_run(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
            with user_errors():
                if is_rank:
                    from hybrid_rlhf.runtime.liveness.launcher import stop_with_launcher

                    stop_with_launcher()
                run(parse_config(config_type, argv, prog=prog, positional=positional))

        return parse_and_run

    return decorate
