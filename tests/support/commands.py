"""Commands of `hybrid-rlhf`, run in this process by their lines."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from hybrid_rlhf.cli.machine.completion import help_document
from hybrid_rlhf.cli.main import main


class Ended(NamedTuple):
    """How a command has ended, and what it has printed."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> Any:
        """The last JSON document of its output."""
        return json.loads(self.out.splitlines()[-1])


@dataclass(frozen=True)
class CommandLine:
    """Runs lines without the name of the program, as a shell splits them."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, line: str | Sequence[str]) -> Ended:
        """Run a command, given by its line or its words, to its end."""
        self.capsys.readouterr()
        logger = logging.getLogger("hybrid_rlhf")
        code, handlers = 0, logger.handlers[:]
        try:
            main(shlex.split(line) if isinstance(line, str) else line)
        except SystemExit as stopped:
            code = int(str(stopped.code or 0))
        finally:
            logger.handlers[:] = handlers
        return Ended(code, *self.capsys.readouterr())

    def refused(self, line: str) -> str:
        """The one line of standard error of a command that ends with exit code 2."""
        ended = self(line)
        assert ended.code == 2 and ended.err.startswith("error: ") and ended.err.count("\n") == 1, ended.err
        return ended.err


def command_helps(words: Sequence[str] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """A command and its subcommands, each with its help as JSON."""
    document = help_document(words)
    yield tuple(words), document
    for name in document.get("subcommands", ()):
        yield from command_helps([*words, name])
