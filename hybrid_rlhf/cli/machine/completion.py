"""`hybrid-rlhf completion bash|zsh|fish`: a completion script for a shell, made from the help of each command by shtab.

The script contains all words, so that completion starts no Python. Print it again after an update:

    hybrid-rlhf completion bash > ~/.local/share/bash-completion/completions/hybrid-rlhf
"""

from __future__ import annotations

import contextlib
import io
import json
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hybrid_rlhf.cli import main as script
from hybrid_rlhf.configs.commands.machine import CompletionConfig
from hybrid_rlhf.configs.parsing.listing import every_key
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import JSON_OPTION, print_result


@command(CompletionConfig, positional="shell")
def main(config: CompletionConfig) -> None:
    """Print the script of a shell."""
    import shtab  # it reads the metadata of packages, which --help need not

    text = shtab.complete(completion_parser(), config.shell)
    print_result({"shell": config.shell, "script": text}, text)


def completion_parser() -> ArgumentParser:
    """A parser with all commands, keys and choices, for their names alone."""
    parser = ArgumentParser(script.PROGRAM)
    parser.add_argument("--version", action="store_true")
    _fill(parser, [])
    return parser


def _fill(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Give a parser the keys of a command with their choices, or its subcommands, and theirs to them."""
    document = help_document(words)
    parser.add_argument(JSON_OPTION, action="store_true")
    if "config" in document:
        parser.add_argument("--help-all", action="store_true")
        _add(parser, "--config", [])
        keys = config_keys(document)
        for key in document["positional"]:
            _add(parser, key, keys[key], nargs="*")
        for key, choices in keys.items():
            _add(parser, f"--{key}", choices)
    else:
        subparsers = parser.add_subparsers()
        for name, about in document["subcommands"].items():
            _fill(subparsers.add_parser(name, help=about.replace("%", "%%")), [*words, name])


def _add(parser: ArgumentParser, name: str, choices: Sequence[str], **options: Any) -> None:
    """Add an argument, whose values are files if its choices are not listed."""
    import shtab

    action = parser.add_argument(name, choices=choices or None, **options)
    if not choices:
        action.complete = shtab.FILE  # type: ignore[attr-defined]


def config_keys(document: dict[str, Any]) -> dict[str, list[str]]:
    """Every key of a command by its help, with its choices."""
    module, _, name = document["config"].rpartition(".")
    return every_key(getattr(import_module(module), name))


def help_document(words: Sequence[str]) -> dict[str, Any]:
    """The help of a command as JSON."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        script.main([*words, "--help", JSON_OPTION])
    document: dict[str, Any] = json.loads(printed.getvalue())
    return document
