"""Sample completions of a report: a few of the first and of the last recorded step.

Only the beginning and the end of samples.jsonl are read, as the file may be larger than memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybrid_rlhf.runtime.files.json_lines import parse_lines

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
    return {"prompt": turns, "completion": _short(row["completion"]), "score": row["score"], "kl": row.get("kl")}


def _short(text: Any) -> str:
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
