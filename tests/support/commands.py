"""Commands of `hybrid-rlhf`, run in this process by their lines."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest

from hybrid_rlhf.cli.machine.completion import help_document
from hybrid_rlhf.cli.main import main
from hybrid_rlhf.runtime import command_line
from tests.support.remedies import require_accepted

DOING = ("loading ", "planning ", "measuring ", "reading ", "merging ", "writing ", "scoring ", "warning: ", "note: ")
"""How lines begin in which a command says what it does."""


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
        words = shlex.split(line) if isinstance(line, str) else line
        with mock.patch.object(command_line, "read_words", wraps=command_line.read_words) as read:
            try:
                main(words)
            except SystemExit as stopped:
                code = int(str(stopped.code or 0))
            finally:
                logger.handlers[:] = handlers
        ended = Ended(code, *self.capsys.readouterr())
        kinds = [call.args[1] for call in read.call_args_list]
        if code == 2 and kinds:
            require_accepted(ended.err or ended.out, kinds[: 1 + (words[0] == "plan")], words)
        return ended

    def refused(self, line: str) -> str:
        """The last line of standard error of a command that ends with exit code 2; before it, what the command did."""
        ended = self(line)
        *before, last = ended.err.splitlines(keepends=True)
        assert ended.code == 2 and last.startswith("error: ") and last.endswith("\n"), ended.err
        assert all(text.startswith(DOING) for text in before), ended.err
        return last


def command_helps(words: Sequence[str] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """A command and its subcommands, each with its help as JSON."""
    document = help_document(words)
    yield tuple(words), document
    for name in document.get("subcommands", ()):
        yield from command_helps([*words, name])
