"""The settings of a training command as a form, and its values as a config and as a command.

Keys, types, help and defaults are those of `--help`, so that the form always has all settings. A list or a mapping is
entered as YAML; an optional section is a switch.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_rlhf.board.processes.commands import nested_values
from hybrid_rlhf.board.processes.inputs import input_problem
from hybrid_rlhf.board.runs.summary import COMMANDS
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import build_config, config_tree
from hybrid_rlhf.configs.parsing.help import field_docs
from hybrid_rlhf.configs.parsing.schema import Key, Layer, Section
from hybrid_rlhf.configs.parsing.yaml_text import yaml_value
from hybrid_rlhf.configs.sections.hints import is_list, options_of, section_type, type_hints, type_name
from hybrid_rlhf.configs.sections.rules import marks_of

PROCESSES = "launcher.num_processes"
"""A field of the form besides the keys of the config."""
_TYPES = {bool: "bool", int: "int", float: "float"}
_REQUIRED = ("model.path", "data.sources", "reward.components", "output_dir")
"""Fields that a form shows first, if the command has them, after the algorithm and with it."""


@dataclass(frozen=True)
class ReadForm:
    """A form's values as a config."""

    config: Any
    processes: int
    values: dict[str, Any]
    """Values by dotted key; texts of lists and mappings are parsed."""


def form_fields(command: str, algorithm: str | None) -> list[dict[str, Any]]:
    """The fields of a command's form, the required ones first; the keys of unused sections are advanced.

    Raises:
        UserError: for another command or algorithm.
    """
    tree = _tree(command, algorithm)
    about = "Processes on this machine that train together."
    unnamed = {section.name: getattr(section.kind, "name", None) for section in _tree(command, None).walk(off=True)}
    fields = [_field(PROCESSES, "int", 1, about, advanced=True)]
    switches = dict(optional_sections(tree))
    for section in tree.walk(off=True):
        if section.name in switches:
            about = (section.kind.__doc__ or "").strip().partition("\n\n")[0]
            advanced = section.advanced or not section.is_on
            fields.append(_field(section.name, "section", section.is_on, " ".join(about.split()), advanced=advanced))
        if section.variants:
            default = unnamed[section.name]
            about = field_docs(section.kind).get("name", "")
            fields.append(_field(f"{section.name}.name", "choice", default, about, choices=list(section.variants)))
        fields += [_key_field(key, section) for key in section.keys.values()]
    first = {key: place for place, key in enumerate(("algorithm.name", *_REQUIRED))}
    return sorted(fields, key=lambda field: first.get(field["key"], len(first)))


def optional_sections(tree: Section) -> Iterator[tuple[str, bool]]:
    """The dotted names of optional sections, and true for those that are used."""
    for section in tree.walk(off=True):
        for name, inner in section.sections.items():
            marks = marks_of(section.kind.__dataclass_fields__[name])  # type: ignore[attr-defined]
            if types.NoneType in options_of(type_hints(section.kind)[name]) and marks.needs is None:
                yield inner.name, inner.is_on


def config_type(command: str) -> type:
    """The config of a training command.

    Raises:
        UserError: if there is no such command.
    """
    if command not in COMMANDS:
        raise UserError(f"command must be one of {', '.join(COMMANDS)}, got {command[:40]!r}: choose one")
    return COMMANDS[command]


def read_form(command: str, values: Mapping[str, Any]) -> ReadForm:
    """The config of a form's values, and the number of processes.

    Raises:
        UserError: for a wrong key or value.
    """
    values = dict(values)
    processes = values.pop(PROCESSES, 1)
    if isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= 1024:
        raise UserError(f"{PROCESSES} must be a number of processes, got {processes!r}: give for example 1")
    kind = config_type(command)
    name = values.get("algorithm.name")
    tree = _tree(command, name if isinstance(name, str) and name else None)
    hints = {key.name: key.hint for key in tree.all_keys(off=True).values()}
    for key, value in values.items():
        if isinstance(value, str) and key in hints:
            values[key] = _read_text(key, value, hints[key])
    given_keys = set(values)
    for switch, _ in optional_sections(tree):
        inside = {key for key in given_keys if key.startswith(f"{switch}.")}
        if values.get(switch) is True and inside:
            del values[switch]  # its keys imply that it is used
    try:
        config: Any = build_config(kind, [Layer(copy.deepcopy(nested_values(values)))])  # the parser changes its input
    except RecursionError:
        raise UserError("values are nested too deeply: simplify them") from None
    return ReadForm(config, processes, values)


def check_form(command: str, values: Mapping[str, Any], check_folder: Callable[[str], None]) -> dict[str, Any]:
    """POST /api/form/check: the error of the values or of what they name, its field, missing fields, and the
    command."""
    try:
        form = read_form(command, values)
    except UserError as error:
        return {"problem": str(error), "key": _key_of(command, str(error)), "missing": [], "command": None}
    key, problem = input_problem(form.config, check_folder) or (None, None)
    lines = form_command(command, form)
    return {"problem": problem, "key": key, "missing": _missing(form.config), "command": lines}


def _key_of(command: str, error: str) -> str | None:
    """The key that an error is about, which it begins with or names; None if it names no key of every config."""
    known = {PROCESSES, "algorithm.name", *config_tree(config_type(command)).all_keys(off=True)}
    words = re.findall(r"\w+(?:\.\w+)*", error)
    return next((word for place, word in enumerate(words) if word in known and (not place or "." in word)), None)


def form_command(command: str, form: ReadForm) -> list[str]:
    """The lines of the shell command for a form's values: the command, then one option per line."""
    start = f"hybrid-rlhf {command}"
    if form.processes > 1:
        start = f"torchrun --standalone --nproc-per-node={form.processes} -m hybrid_rlhf {command}"
    return [start, *(_option(key, value) for key, value in form.values.items())]


def _option(key: str, value: Any) -> str:
    word = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"--{key}{'=' if word.startswith('--') else ' '}{shlex.quote(word)}"


def _missing(config: Any) -> list[str]:
    """Required fields without a value."""
    values = {"model.path": config.model.path, "data.sources": config.data.sources}
    if hasattr(config, "environment") and config.environment is None:
        values["reward.components"] = config.reward.components
    return [key for key, value in values.items() if not value]


def _tree(command: str, algorithm: str | None) -> Section:
    return config_tree(config_type(command), [] if algorithm is None else ["--algorithm.name", algorithm])


def _read_text(key: str, text: str, hint: Any) -> Any:
    """The value of a field from its text.

    Raises:
        UserError: if the text is not YAML.
    """
    if is_list(hint):
        return _read_list(key, text)
    if not _is_structured(hint) or not text.strip():
        return text
    return yaml_value(text, key)


def _read_list(key: str, text: str) -> Any:
    """A list from YAML, from a single mapping, or from an item per line: a bare word or {KEY: VALUE}.

    Raises:
        UserError: if the text has none of these forms.
    """
    text = text.strip()
    if text == "null":
        return None
    if text.startswith(("[", "- ", "-\n")):
        items = yaml_value(text, key)
        if not isinstance(items, list):
            raise UserError(f"{key} must be a list, got {text[:80]!r}: write an item per line")
        return items
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(re.match(r"\w+:(\s|$)", line) for line in lines):
        return [yaml_value(text, key)]
    return [
        yaml_value(line, f"{key}: item {place}") if line.startswith("{") else line
        for place, line in enumerate(lines, 1)
    ]


def _is_structured(hint: Any) -> bool:
    """Return True if a value may be a list, a tuple or a mapping."""
    return any(typing.get_origin(option) in (list, dict, tuple) for option in options_of(hint)) or (
        section_type(hint) is not None
    )


def _key_field(key: Key, section: Section) -> dict[str, Any]:
    kind, choices = _kind(key.hint)
    about = field_docs(key.owner).get(key.name.rpartition(".")[2], "")
    advanced = key.advanced or not section.is_on or section.advanced
    shown = list(key.default) if isinstance(key.default, tuple) else key.default
    help_text = f"{about} ({type_name(key.hint)})" if kind in ("str", "yaml") else about
    return _field(key.name, kind, shown, help_text, choices=choices, advanced=advanced)


def _field(
    key: str, kind: str, default: Any, about: str, *, choices: list[Any] | None = None, advanced: bool = False
) -> dict[str, Any]:
    return {
        "key": key,
        "type": kind,
        "choices": choices,
        "default": default,
        "help": about,
        "advanced": advanced,
        "required": key in _REQUIRED,
    }


def _kind(hint: Any) -> tuple[str, list[Any] | None]:
    """The type of a field, and the choices if it has a few values."""
    if is_list(hint):
        return "list", None
    if _is_structured(hint):
        return "yaml", None
    options = [option for option in options_of(hint) if option is not types.NoneType]
    literals = [
        value for option in options if typing.get_origin(option) is typing.Literal for value in typing.get_args(option)
    ]
    if literals and len(options) == 1:
        return "choice", literals
    return (_TYPES.get(options[0], "str"), None) if len(options) == 1 else ("str", None)
