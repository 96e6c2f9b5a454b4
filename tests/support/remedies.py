"""Whether the command that prints a message accepts the keys and values that the message names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.schema import typed_fields
from hybrid_rlhf.configs.pipeline import STEPS, PlanConfig
from hybrid_rlhf.runtime.command_line import parse_config

_KEY = re.compile(
    r"(?<![\w./$@<{-])(?:--([a-z][\w.]*\w)|([a-z]\w*(?:\.[a-z]\w*)+))(?![\w(/-]|\.\w)"
    r"(?: (?:to )?([a-z_\d.-]*[a-z_\d])(?=[,;:)\n]|$| (?:and|or|if) ))?"
)
"""An option or a dotted key, and a value behind it."""
_CHOICE = re.compile(r"--([a-z]+\.)?algorithm(\.name)?")
_WRONG = re.compile(r"(?:unknown option --|unknown key |no key )\S+|TRL's .* of another step")
_FILES = ("arrow", "csv", "gguf", "json", "jsonl", "md", "parquet", "py", "safetensors", "yaml")
_OF_EVERY_COMMAND = ("help", "config", "json")
_NO_VALUES = ("another", "one", "out", "it", "folder", "instead")


@cache
def _sections() -> frozenset[str]:
    """First parts of dotted keys."""
    kinds = [PlanConfig, *STEPS.values()]
    return frozenset(declared.name for kind in kinds for declared, _, inner in typed_fields(kind) if inner)


def named_keys(message: str) -> Iterator[tuple[str, str]]:
    """Keys that a message names and does not call wrong, each with the value that its fix names, or none."""
    known = _WRONG.sub("", message)
    fix = known.rfind(": ")
    for match in _KEY.finditer(known):
        option, dotted, value = match.groups()
        key = option or dotted
        is_key = option or (key.split(".")[0] in _sections() and key.rpartition(".")[2] not in _FILES)
        if is_key and key not in _OF_EVERY_COMMAND:
            yield key, value if value and match.start() > fix and value not in _NO_VALUES else ""


def require_accepted(message: str, kinds: Sequence[type], words: Sequence[str] = ()) -> None:
    """Require every key that a message names, with its value, of a command.

    Args:
        message: what the command has printed.
        kinds: configs of which the command reads one or several from its line.
        words: the line, whose algorithm decides which keys there are.
    """
    chosen = [word for pair in pairwise(words) if _CHOICE.fullmatch(pair[0]) for word in pair]
    for key, value in named_keys(message):
        faults = [_fault(kind, chosen, key, value) for kind in kinds]
        assert None in faults, f"{message!r} names {key} {value}: {faults}"


def _fault(kind: type, chosen: Sequence[str], key: str, value: str) -> str | None:
    """Why a config has no such key, or not with this value; None if it has."""
    try:
        parse_config(kind, [*chosen, f"--{key}", value or "null"])
    except UserError as error:
        text = str(error)
        of_value = value and text.startswith(f"{key} must be")
        return text if text.startswith("unknown ") or " has no key " in text or of_value else None
    return None
