"""The settings of a training command as a form, and its values as a config.

Keys, types, help and defaults are those of `--help`, so that a new setting is in the form at once.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from hybrid_rlhf.board.processes.commands import nested_values
from hybrid_rlhf.board.runs.summary import COMMANDS
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.command_line import build_config, config_tree
from hybrid_rlhf.configs.parsing.derived import derived_defaults
from hybrid_rlhf.configs.parsing.help import field_docs
from hybrid_rlhf.configs.parsing.schema import Key, Layer, Section, is_list, options_of, type_name

PROCESSES = "launcher.num_processes"
"""A field beside the keys of the config."""
_TYPES = {bool: "bool", int: "int", float: "float"}


def form_fields(command: str, algorithm: str | None) -> list[dict[str, Any]]:
    """The fields of a command's form; the keys of unused sections are advanced.

    Raises:
        UserError: for another command or algorithm.
    """
    tree = config_tree(config_type(command), [] if algorithm is None else ["--algorithm.name", algorithm])
    chosen = derived_defaults(tree)
    about = "Processes on this machine that train together."
    fields = [_field(PROCESSES, "int", 1, about, advanced=True)]
    for section in tree.walk(off=True):
        if section.variants:
            default, help_text = getattr(section.kind, "name", None), field_docs(section.kind).get("name", "")
            fields.append(_field(f"{section.name}.name", "choice", default, help_text, choices=list(section.variants)))
        fields += [_key_field(key, section, chosen) for key in section.keys.values()]
    return fields


def config_type(command: str) -> type:
    """The config of a training command.

    Raises:
        UserError: if there is none of that name.
    """
    if command not in COMMANDS:
        raise UserError(f"command must be one of {', '.join(COMMANDS)}, got {command[:40]!r}: choose one")
    return COMMANDS[command]


def read_form(command: str, values: Mapping[str, Any]) -> tuple[Any, int]:
    """The config of a form's values, and the number of processes.

    Raises:
        UserError: for a wrong key or value.
    """
    values = dict(values)
    processes = values.pop(PROCESSES, 1)
    if isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= 1024:
        raise UserError(f"{PROCESSES} must be a number of processes, got {processes!r}: give for example 1")
    try:
        return build_config(config_type(command), [Layer(nested_values(values))]), processes
    except RecursionError:
        raise UserError("values are nested too deeply: simplify them") from None


def _key_field(key: Key, section: Section, chosen: Mapping[str, Any]) -> dict[str, Any]:
    kind, choices = _kind(key.hint)
    about = field_docs(key.owner).get(key.name.rpartition(".")[2], "")
    advanced = key.advanced or not section.is_on or section.advanced
    default = chosen.get(key.name, key.default)
    shown = list(default) if isinstance(default, tuple) else default
    help_text = f"{about} ({type_name(key.hint)})" if kind == "str" else about
    return _field(key.name, kind, shown, help_text, choices=choices, advanced=advanced)


def _field(
    key: str, kind: str, default: Any, about: str, *, choices: list[Any] | None = None, advanced: bool = False
) -> dict[str, Any]:
    return {"key": key, "type": kind, "choices": choices, "default": default, "help": about, "advanced": advanced}


def _kind(hint: Any) -> tuple[str, list[Any] | None]:
    """The type of a field, and the choices of one with a few values."""
    if is_list(hint):
        return "list", None
    options = [option for option in options_of(hint) if option is not types.NoneType]
    literals = [
        value for option in options if typing.get_origin(option) is typing.Literal for value in typing.get_args(option)
    ]
    if literals and len(options) == 1:
        return "choice", literals
    return (_TYPES.get(options[0], "str"), None) if len(options) == 1 else ("str", None)
