"""Rules for all values of all configs: numbers are finite, texts can be encoded."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hybrid_rlhf.configs.credentials import found_credential
from hybrid_rlhf.configs.sections.rules import require

_LARGEST = 2**63 - 1
"""Largest integer of torch, numpy and Arrow."""
_MAY_BE_BLANK = ("system", "step_separator", "text", "completion")


def check_values(value: Any, key: str = "") -> None:
    """Check all values of a config.

    Raises:
        UserError: for a number that is not finite or has more than 64 bits, a text that cannot be encoded, a value that
            YAML has and JSON has not, or a credential.
    """
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            check_values(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_values(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            check_values(item, f"{key}.{name}")
    elif isinstance(value, float):  # pydantic does not see those within mappings of any values
        require(math.isfinite(value), f"{key} must be a finite number, got {value}: give one, or leave it out")
    elif isinstance(value, int):
        require(abs(value) <= _LARGEST, f"{key} must be at most 2**63 - 1 in size, got {_short(value)}: lower it")
    elif isinstance(value, str):
        _check_text(value, key)
    else:
        require(value is None, f"{key} must be a text, a number, a list or a mapping, got {value}: put it in quotes")


def is_text(text: str) -> bool:
    """Return True if a text can be encoded as UTF-8 and name a file: no lone surrogates, no NUL."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _check_text(text: str, key: str) -> None:
    require(is_text(text), f"{key} must be text that UTF-8 can write, got {text!r}: write it again")
    require(
        text.strip() or key.rpartition(".")[2] in _MAY_BE_BLANK,
        f"{key} may not be empty: give a value, or leave it out",
    )
    kind = found_credential(text)
    require(
        kind is None,
        f"{key} may not carry {kind}, for a config is saved and shown: log in with `hf auth login` or HF_TOKEN, or "
        "give a path without it",
    )


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**30 else f"a number of {number.bit_length()} bits"
