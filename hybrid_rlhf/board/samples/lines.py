"""Prompts and texts of samples.jsonl: prompts as messages, their keys, words for the search, previews."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from typing import Any

from hybrid_rlhf.runtime.observability.samples import recorded_images

_SINGLE = "\u3040-\u30ff\u3400-\u9fff"
"""Characters of languages that are written without spaces: each counts as a word."""
_WORD = re.compile(rf"[{_SINGLE}]|[^\W_{_SINGLE}]+")
_ACCENTS = re.compile("[\u0300-\u036f]+")
_PREVIEW = 200
"""Longest preview."""


def prompt_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a row as messages."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return [
            message if isinstance(message, dict) else {"role": "user", "content": str(message)} for message in prompt
        ]
    return [{"role": "user", "content": "" if prompt is None else str(prompt)}]


def last_text(messages: list[dict[str, Any]]) -> str:
    """The text of the last message."""
    return str(messages[-1].get("content") or "") if messages else ""


def prompt_key(row: dict[str, Any]) -> str:
    """A hash of messages and images of a row's prompt that is the same in all runs, as 16 hexadecimal digits."""
    messages = prompt_messages(row)
    digests = [image["digest"] for image in recorded_images(row)]
    text = json.dumps([messages, digests] if digests else messages, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case and without accents."""
    text = text.casefold()
    if not text.isascii():
        text = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    return _WORD.findall(text)


def preview(text: str) -> str:
    """The beginning of a text on one line."""
    shown = " ".join(text[: 2 * _PREVIEW].split())
    return shown if len(shown) <= _PREVIEW else f"{shown[: _PREVIEW - 3]}..."
