"""Sample completions of a report: a few of the first and of the last recorded step.

Only the beginning and the end of samples.jsonl are read, as the file may be larger than memory.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.images.reading import thumbnail
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.runtime.files.json_lines import parse_lines
from hybrid_rlhf.runtime.observability.samples import episode_images

_END_BYTES = 2**21
_ROWS = 4
_LONGEST_TEXT = 2000


def first_and_last_samples(path: Path) -> list[dict[str, Any]]:
    """`{"step": ..., "rows": [...]}` of the first and the last step of samples.jsonl; [] without it."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        head = file.read(_END_BYTES)
        size = file.seek(0, 2)
        file.seek(max(0, size - _END_BYTES))
        tail = file.read()
    if size > _END_BYTES:  # both have a part of a line
        head = head[: head.rfind(b"\n") + 1]
        tail = tail[tail.find(b"\n") + 1 :]
    first, last = ([row for row, _ in parse_lines(part)] for part in (head, tail))
    by_step = {rows[place]["step"]: rows for rows, place in ((first, 0), (last, -1)) if rows}
    return [
        {"step": step, "rows": [_sample(row) for row in rows if row["step"] == step][:_ROWS]}
        for step, rows in by_step.items()
    ]


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    turns = [{"role": turn["role"], "content": _short(turn.get("content", ""))} for turn in row["prompt"]]
    images = [{"name": Path(image["path"]).name, "uri": _thumbnail(image)} for image in episode_images(row)]
    numbers = {"score": row["score"], "kl": row.get("kl")}
    return {"prompt": turns, "images": images, "completion": _short(row["completion"]), **numbers}


def _thumbnail(image: dict[str, Any]) -> str:
    """A small image as a data URI; empty if its file is missing or has changed."""
    try:
        content = thumbnail(ImageReference(**image).image())
    except UserError:
        return ""
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def _short(text: Any) -> str:
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
