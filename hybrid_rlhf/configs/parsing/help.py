"""The text of `--help` and `--help-all`, from the docstrings of the fields.

Unlike a parser's own help, it reads docstrings only when help is requested, shows an unused section as one line, and
shows rarely needed keys only with `--help-all`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rlhf.configs.parsing.listing import choices_of
from hybrid_rlhf.configs.parsing.schema import Section
from hybrid_rlhf.configs.sections.hints import type_name

_WIDTH = 110
"""Longest line, and the width where there is no terminal."""


@dataclass(frozen=True)
class Help:
    """The help of a command: every key with its meaning, type and default."""

    tree: Section
    """Result of `resolve`."""
    prog: str
    """Name of the command."""
    everything: bool
    """True to show advanced keys and the keys of unused sections too."""
    positional: Sequence[str]
    """Keys whose values the first words of the command line may give."""

    def text(self) -> str:
        """The help for readers."""
        words = "".join(f" [{key.rpartition('.')[2].upper()}]" for key in self.positional)
        lines = [f"usage: {self.prog}{words} [--config FILE.yaml] [--KEY VALUE ...]", ""]
        lines += [*wrapped(_about(self.tree.kind)), ""]
        options = {
            "--config FILE.yaml": "YAML file of keys; may be given more than once.",
            "--help": "Show this help without rarely needed keys.",
            "--help-all": "Show every key, including unused sections.",
        }
        for option, about in options.items():
            lines += _entry(option, about)
        for section in self.tree.walk(off=self.everything):
            lines += self._section_lines(section)
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """The help for programs; `choices` are the values that a key takes, null if they are not listed."""
        kind = self.tree.kind
        return {
            "command": self.prog,
            "about": _about(kind),
            "config": f"{kind.__module__}.{kind.__name__}",
            "positional": self.positional,
            "keys": [key for section in self.tree.walk(off=self.everything) for key in self._described(section)],
        }

    def _described(self, section: Section) -> list[dict[str, Any]]:
        """The keys of a section that help shows; the choice of its dataclass comes first."""
        keys: list[dict[str, Any]] = [
            {
                "name": key.name,
                "about": field_docs(key.owner).get(name, ""),
                "type": type_name(key.hint),
                "default": key.usual,
                "choices": choices_of(key.hint),
            }
            for name, key in section.keys.items()
            if self.everything or not key.advanced
        ]
        if not section.variants:
            return keys
        kind: Any = section.kind
        choice = {
            "name": f"{section.name}.name",
            "about": field_docs(kind)["name"],
            "type": "str",
            "default": kind.name,
            "choices": [*section.variants],
        }
        return [choice, *keys]

    def _section_lines(self, section: Section) -> list[str]:
        lines: list[str] = []
        for key in self._described(section):
            option = f"--{key['name']}"
            kind = f"type: {key['type']},"
            if key["name"] == f"{section.name}.name" and section.variants:
                option = f"{option}, --{section.name}"
                kind = f"one of {', '.join(section.variants)};"
            lines += _entry(option, f"{key['about']} ({kind} default: {_shown(key['default'])})")
        for inner in () if self.everything else section.sections.values():
            if not (inner.is_on or inner.advanced):
                about = _text((inspect.getdoc(inner.kind) or "").split("\n\n")[0])
                names = ", ".join([*inner.keys, *inner.sections])
                lines += _entry(f"--{inner.name}", f"{about} (section, default: null; keys: {names})")
        return ["", *wrapped(f"{section.name}: {_about(section.kind)}"), *lines] if lines and section.name else lines


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, including inherited ones."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = _classes(base.__module__)[base.__name__].body
        for before, after in itertools.pairwise(body):
            match before, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = _text(text)
    return docs


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by name; parsing a module once is faster than parsing each of its classes."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _about(kind: type) -> str:
    return _text(inspect.getdoc(kind) or "")


def _entry(option: str, about: str) -> list[str]:
    return [f"  {option}", *wrapped(about, " " * 8, " " * 8)]


def wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """A text as lines that fit the terminal, which begin with `first` and `rest`; words are kept whole."""
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _text(text: str) -> str:
    return " ".join(text.split())


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(list(value)) if isinstance(value, tuple) else str(value)
