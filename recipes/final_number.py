"""Verified reward for arithmetic: 1 if the last number of a completion is the row's `answer`, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def correct(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **columns: Any) -> list[float]:
    """The score of each completion."""
    return [
        float(_last_number(text) == _last_number(str(expected)))
        for text, expected in zip(completions, answer, strict=True)
    ]


def _last_number(text: str) -> float | None:
    """The last number of a text; thousands may be separated by commas."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
