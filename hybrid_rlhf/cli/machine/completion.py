"""`hybrid-rlhf completion bash|zsh|fish`: a completion script for a shell, made from the help of each command.

The script contains all words, so that completion starts no Python. Print it again after an update:

    hybrid-rlhf completion bash > ~/.local/share/bash-completion/completions/hybrid-rlhf
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from hybrid_rlhf.cli import main as script
from hybrid_rlhf.cli.machine.scripts import SCRIPTS, CompletedCommand
from hybrid_rlhf.configs.commands.machine import CompletionConfig
from hybrid_rlhf.configs.parsing.listing import every_key
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import JSON_OPTION, print_result


@command(CompletionConfig, positional="shell")
def main(config: CompletionConfig) -> None:
    """Print the script of a shell."""
    text = SCRIPTS[config.shell](script.PROGRAM, list(completed_commands()))
    print_result({"shell": config.shell, "script": text}, text)


def completed_commands(words: Sequence[str] = ()) -> Iterator[CompletedCommand]:
    """A command and its subcommands, with the keys of each."""
    document = _help(words)
    subcommands: dict[str, str] = document.get("subcommands", {})
    keys: dict[str, list[str]] = {}
    choices: list[str] = []
    if "config" in document:
        module, _, name = document["config"].rpartition(".")
        keys = every_key(getattr(import_module(module), name))
        choices = [choice for key in document["positional"][:1] for choice in keys.get(key, []) if choice]
    yield CompletedCommand(tuple(words), subcommands, keys, choices)
    for name in subcommands:
        yield from completed_commands([*words, name])


def _help(words: Sequence[str]) -> dict[str, Any]:
    """The help of a command as JSON."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        script.main([*words, "--help", JSON_OPTION])
    document: dict[str, Any] = json.loads(printed.getvalue())
    return document
