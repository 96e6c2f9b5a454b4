"""Rules that sections check their values by: one line of error unless they hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybrid_rlhf.configs.errors import UserError


def require(condition: bool, message: str) -> None:
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)


def is_plain(values: Mapping[str, Any]) -> bool:
    """Whether JSON, and so the run's config.yaml, can hold values."""
    try:
        return bool(json.loads(json.dumps(values, allow_nan=False)) == values)
    except (TypeError, ValueError):  # a date, a number that is not finite
        return False


def require_template_variables(values: Mapping[str, Any]) -> None:
    """Raise UserError unless values can be variables of a chat template."""
    require(
        is_plain(values) and all(name.isidentifier() for name in values),
        f"chat_template_kwargs are names with texts, numbers, lists and mappings, got {values}: give for example "
        "{enable_thinking: false}",
    )


def whole_number(value: Any) -> int:
    """A number of 0 or more from a file or the command line; anything else counts as 0, and is refused elsewhere."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else 0
