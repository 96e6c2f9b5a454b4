"""The README.md of a model folder: metadata of the Hugging Face hub as YAML, and a text.

A card that this library wrote ends with a checksum of itself. It is replaced by that of a later save only as long as
the checksum holds: a card that a user wrote or changed stays.
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
    given = {name: value for name, value in sorted(metadata.items()) if value}
    card = f"---\n{yaml.safe_dump(given, allow_unicode=True)}---\n\n{text.strip()}\n"
    return f"{card}\n<!-- hybrid_rlhf card {_checksum(card)} -->\n"


def may_write_card(folder: Path) -> bool:
    """Whether a folder has no card, or one that nobody has changed since this library wrote it."""
    file = folder / CARD_FILE
    if not file.exists():
        return True
    card = file.read_text(errors="replace")
    found = _CHECKSUM.search(card)
    return found is not None and found[1] == _checksum(card[: found.start()])


def read_card_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a folder's card; {} without a card, or where it has none that can be read."""
    try:
        found = _METADATA.match((folder / CARD_FILE).read_text(errors="replace"))
        content = yaml.safe_load(found[1]) if found else None
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _checksum(card: str) -> str:
    return hashlib.sha256(card.encode()).hexdigest()[:16]
