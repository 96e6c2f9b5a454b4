"""The text of `--help` and `--help-all`, from the docstrings of the fields.

Unlike a parser's own help, it reads docstrings only when help is requested, shows an unused section as one line, and
shows rarely needed keys only with `--help-all`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rlhf.configs.parsing.listing import choices_of
from hybrid_rlhf.configs.parsing.schema import Section, type_name

_WIDTH = 110


def help_text(
    tree: Section,
    chosen: Mapping[str, Any],
    *,
    prog: str,
    everything: bool,
    positional: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> str:
    """Usage, and every key with its meaning, type and default.

    Args:
        tree: result of `resolve`.
        chosen: defaults that follow from the settings, by dotted key.
        prog: name of the command.
        everything: true to show advanced keys and the keys of unused sections too.
        positional: keys whose values the first words of the command line may give.
        options: options of the command besides its keys, with their meanings.
    """
    words = "".join(f" [{key.rpartition('.')[2].upper()}]" for key in positional)
    lines = [f"usage: {prog}{words} [--config FILE.yaml] [--KEY VALUE ...]", ""]
    lines += [*textwrap.wrap(_text(inspect.getdoc(tree.kind) or ""), _WIDTH), ""]
    lines += _entry("--config FILE.yaml", "YAML file of keys; may be given more than once.")
    for option, about in (options or {}).items():
        lines += _entry(option, about)
    lines += _entry("--help", "Show this help without rarely needed keys.")
    lines += _entry("--help-all", "Show every key, including unused sections.")
    for section in tree.walk(off=everything):
        lines += _section_lines(section, chosen, everything=everything)
    return "\n".join(lines) + "\n"


def help_document(
    tree: Section,
    chosen: Mapping[str, Any],
    *,
    prog: str,
    everything: bool,
    positional: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The help for programs; `choices` are the values that a key takes, null if they are not listed."""
    keys = [key for section in tree.walk(off=everything) for key in _described(section, chosen, everything=everything)]
    about = _text(inspect.getdoc(tree.kind) or "")
    config = f"{tree.kind.__module__}.{tree.kind.__name__}"
    return {
        "command": prog,
        "about": about,
        "config": config,
        "positional": list(positional),
        "options": dict(options or {}),
        "keys": keys,
    }


def _described(section: Section, chosen: Mapping[str, Any], *, everything: bool) -> list[dict[str, Any]]:
    """The keys of a section that help shows; the choice of its dataclass comes first."""
    keys: list[dict[str, Any]] = []
    if section.variants:
        default = getattr(section.kind, "name", "")
        choices = list(section.variants)
        about = field_docs(section.kind)["name"]
        keys.append(
            {"name": f"{section.name}.name", "about": about, "type": "str", "default": default, "choices": choices}
        )
    for name, key in section.keys.items():
        if everything or not key.advanced:
            about = field_docs(key.owner).get(name, "")
            default = chosen.get(key.name, key.default)
            kind = type_name(key.hint)
            choices_or_none = choices_of(key.hint)
            keys.append(
                {"name": key.name, "about": about, "type": kind, "default": default, "choices": choices_or_none}
            )
    return keys


def _unused(section: Section) -> list[Section]:
    """Its inner sections that are off, except rarely needed ones."""
    return [inner for inner in section.sections.values() if not (inner.is_on or inner.advanced)]


def _section_lines(section: Section, chosen: Mapping[str, Any], *, everything: bool) -> list[str]:
    keys = _described(section, chosen, everything=everything)
    unused = [] if everything else _unused(section)
    if not (keys or unused):
        return []
    lines = ["", f"{section.name}: {_text(inspect.getdoc(section.kind) or '')}"] if section.name else []
    for key in keys:
        option = f"--{key['name']}"
        kind = f"type: {key['type']},"
        default = _shown(key["default"])
        if key["name"] == f"{section.name}.name" and section.variants:
            option = f"{option}, --{section.name}"
            kind = f"one of {', '.join(section.variants)};"
        lines += _entry(option, f"{key['about']} ({kind} default: {default})")
    for inner in unused:
        about = (inspect.getdoc(inner.kind) or "").split("\n\n")[0]
        names = ", ".join([*inner.keys, *inner.sections])
        lines += _entry(f"--{inner.name}", f"{_text(about)} (section, default: null; keys: {names})")
    return lines


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, including inherited ones."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        docs |= _own_docs(base)
    return docs


@functools.cache
def _own_docs(kind: type) -> dict[str, str]:
    body = _classes(kind.__module__)[kind.__name__]
    docs = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                docs[before.target.id] = _text(text.value)
    return docs


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by name; parsing a module once is faster than parsing each of its classes."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _entry(option: str, about: str) -> list[str]:
    return [f"  {option}", *textwrap.wrap(about, _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)]


def _text(text: str) -> str:
    return " ".join(text.split())


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)
