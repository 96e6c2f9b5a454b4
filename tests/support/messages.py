"""Turns of a conversation."""

from __future__ import annotations

from typing import Any


def user(content: Any) -> dict[str, Any]:
    """A turn of the user."""
    return {"role": "user", "content": content}


def assistant(text: str) -> dict[str, str]:
    """A turn of the assistant."""
    return {"role": "assistant", "content": text}
