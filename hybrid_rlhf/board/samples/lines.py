"""What of the lines of samples.jsonl is indexed: numbers as columns, each prompt once, and the texts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from hybrid_rlhf.board.runs.reading import is_count, number, parsed

ROW_COLUMNS = {
    "offset": "<i8",
    "prompt": "<i4",
    "step": "<i4",
    "index": "<i4",
    "group": "<i4",
    "score": "<f4",
    "kl": "<f4",
    "length": "<f4",
}
"""File format of each column; `prompt` is the place of a prompt; a missing number is NaN, a missing group -1.

Components have one more column each.
"""
PROMPT_COLUMNS = {"prompt_number": "<i8", "prompt_row": "<i8"}
"""The same for prompts, in the order in which they first appear: `prompt_number`, and the first row."""
_MOST_COMPONENTS = 64


@dataclass
class NewRows:
    """Lines on their way into the index."""

    rows: int
    """How many rows are indexed; the first new one has this number."""
    step: int
    position: int
    """The step of the last row, and the next position in it, for rows without an index."""
    components: tuple[str, ...]
    prompts: dict[int, int]
    """The place of each prompt, by its number."""
    skipped: int = 0
    """Lines that are no samples."""
    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ROW_COLUMNS | PROMPT_COLUMNS})
    parts: list[dict[str, float]] = field(default_factory=list)
    """Components of each row."""
    completions: list[str] = field(default_factory=list)
    prompt_texts: list[str] = field(default_factory=list)
    """The last message of each new prompt."""
    _last_prompt: tuple[Any, int] = (None, -1)

    def add(self, offset: int, line: bytes) -> None:
        """Take a line that begins at a byte of the file."""
        row = parsed(line)
        if row is None or "completion" not in row:
            self.skipped += 1
            return
        step = row["step"]
        position = self.position if step == self.step else 0
        self.step, self.position = step, position + 1
        index, group, parts = row.get("index"), row.get("group"), row.get("components")
        columns = self.columns
        columns["offset"].append(offset)
        columns["prompt"].append(self._prompt_of(row))
        columns["step"].append(step)
        columns["index"].append(index if is_count(index) else position)  # type: ignore[arg-type]
        columns["group"].append(group if is_count(group) else -1)  # type: ignore[arg-type]
        for name in ("score", "kl", "length"):
            columns[name].append(number(row.get(name)))
        parts = {str(name): number(value) for name, value in parts.items()} if isinstance(parts, dict) else {}
        self.parts.append(parts)
        if not parts.keys() <= set(self.components):
            new = [name for name in parts if name not in self.components]
            self.components = (*self.components, *new)[:_MOST_COMPONENTS]
        self.completions.append(str(row["completion"]))

    def _prompt_of(self, row: dict[str, Any]) -> int:
        """The place of a row's prompt."""
        prompt = row.get("prompt")
        if self._last_prompt[1] >= 0 and prompt == self._last_prompt[0]:  # the rows of a group follow each other
            return self._last_prompt[1]
        messages = prompt_messages(row)
        name = prompt_number(messages)
        place = self.prompts.get(name, len(self.prompts))
        if place == len(self.prompts):
            self.prompts[name] = place
            self.columns["prompt_number"].append(name)
            self.columns["prompt_row"].append(self.rows + len(self.completions))
            self.prompt_texts.append(_last_text(messages))
        self._last_prompt = (prompt, place)
        return place


def prompt_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a row as messages."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return [
            message if isinstance(message, dict) else {"role": "user", "content": str(message)} for message in prompt
        ]
    return [{"role": "user", "content": "" if prompt is None else str(prompt)}]


def prompt_text(row: dict[str, Any]) -> str:
    """What the last message of a row's prompt says."""
    return _last_text(prompt_messages(row))


def prompt_number(messages: list[dict[str, Any]]) -> int:
    """A hash of messages that is the same in all runs, as a signed number of 64 bits."""
    text = json.dumps(messages, sort_keys=True, ensure_ascii=False)
    digest = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _last_text(messages: list[dict[str, Any]]) -> str:
    return str(messages[-1].get("content") or "") if messages else ""
