"""The README.md of a model folder: metadata for the Hugging Face hub as YAML, and a text.

A card that this library wrote ends with a checksum of its text. A later save replaces it only if the checksum matches:
a card that a user wrote or changed stays.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CARD_FILE = "README.md"
_CHECKSUM = re.compile(r"\n<!-- hybrid_rlhf card ([0-9a-f]{16}) -->\n\Z")
_METADATA = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?\n", re.DOTALL)


def render_card(metadata: Mapping[str, Any], text: str) -> str:
    """A card of metadata and a Markdown text, with its checksum; entries that are None or empty are left out."""
    entries = {name: value for name, value in sorted(metadata.items()) if value}
    card = f"---\n{yaml.safe_dump(entries, allow_unicode=True)}---\n\n{text.strip()}\n"
    return f"{card}\n<!-- hybrid_rlhf card {_checksum(card)} -->\n"


def may_write_card(folder: Path) -> bool:
    """Return True if a folder has no card, or one that nobody has changed since this library wrote it."""
    file = folder / CARD_FILE
    if not file.exists():
        return True
    card = file.read_text(errors="replace")
    checksum = _CHECKSUM.search(card)
    return checksum is not None and checksum[1] == _checksum(card[: checksum.start()])


def read_card_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a folder's card; {} without a card or without readable metadata."""
    try:
        match = _METADATA.match((folder / CARD_FILE).read_text(errors="replace"))
        content = yaml.safe_load(match[1]) if match else None
    except (OSError, ValueError, yaml.YAMLError):  # ValueError: a date that does not exist
        return {}
    return content if isinstance(content, dict) else {}


def texts(value: Any) -> list[str]:
    """The texts of an entry of a card's metadata, which may be one, a list, or anything that a user wrote."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _checksum(card: str) -> str:
    return hashlib.sha256(card.encode()).hexdigest()[:16]
