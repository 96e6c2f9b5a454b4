"""Turns of a conversation."""

from __future__ import annotations


def user(text: str) -> dict[str, str]:
    """A turn of the user."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    """A turn of the assistant."""
    return {"role": "assistant", "content": text}
