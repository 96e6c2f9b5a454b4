"""Judgements of people, who choose the better of two completions of a prompt, blind and in random order.

They are appended to `preferences.jsonl` in the board's first folder, with the shown pair. They measure how often reward
and people agree, and are training data for `hybrid-rlhf reward`.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_rlhf.board.runs.reading import complete_lines, finite, number, open_regular
from hybrid_rlhf.board.samples.lines import prompt_messages
from hybrid_rlhf.board.samples.rows import Samples
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.atomic import write_whole

PREFERENCES_FILE = "preferences.jsonl"
_MOST_OPEN = 1000
"""Number of pairs that were shown and not judged; the oldest are dropped."""
_TRIES = 40
_PROMPTS = "SELECT key FROM prompts JOIN samples USING (prompt) GROUP BY prompt HAVING count(*) >= ?"


@dataclass(frozen=True)
class ShownPair:
    """Two completions of a prompt, as they were shown."""

    prompt: list[dict[str, Any]]
    completions: list[str]
    """Left and right."""
    sides: list[dict[str, Any]]
    """`run` (its folder), `step`, `index` and `score` of each."""


class Preferences:
    """The judgements of one board."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of the file."""
        self.file = folder / PREFERENCES_FILE
        self._open: OrderedDict[str, ShownPair] = OrderedDict()
        self._random = random.Random(secrets.randbits(64))  # nosec B311
        self._lock = threading.Lock()

    def next(self, sources: Sequence[Samples]) -> dict[str, Any]:
        """A pair to judge, of one run or of two runs; without a pair if no prompt has two completions."""
        judged = {_places(row["shown"]) for row in self.read()}
        prompts = _prompts_to_judge(sources)
        for _ in range(_TRIES if prompts else 0):
            pair = self._draw(sources, self._random.choice(prompts))
            left, right = pair.completions
            if left == right or _places(pair.sides) in judged:
                continue
            name = secrets.token_hex(8)
            with self._lock:
                self._open[name] = pair
                while len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)
            return {"pair": name, "prompt": pair.prompt, "left": left, "right": right}
        return {"pair": None}

    def judge(self, name: str, choice: str, who: str) -> int:
        """Append a judgement; return the number of judgements.

        Raises:
            UserError: if this board has not shown the pair, or if it is already judged.
            OSError: if it cannot be written.
        """
        with self._lock:
            pair = self._open.pop(name, None)
            if pair is None:
                raise UserError(f"pair must be one that was shown and not judged yet, got {name[:40]!r}: take the next")
            better, worse = pair.completions if choice != "right" else pair.completions[::-1]
            is_tie = choice == "equal"
            row = {
                "prompt": pair.prompt,
                **({"responses": [better, worse]} if is_tie else {"chosen": better, "rejected": worse}),
                "tie": is_tie,
                "who": who,
                "when_seconds": round(time.time(), 3),
                "shown": pair.sides,
                "choice": choice,
            }
            line = json.dumps(row, allow_nan=False).encode() + b"\n"
            with self.file.open("ab", buffering=0) as file:
                file.write(line)  # one write, as another board may also append
                os.fsync(file.fileno())
        return len(self.read())

    def read(self) -> list[dict[str, Any]]:
        """All judgements; invalid lines are left out."""
        try:
            with open_regular(self.file) as file:
                lines = [line for chunk in complete_lines(file, 0) for _, line in chunk]
        except FileNotFoundError:
            return []
        rows = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and {"prompt", "tie", "shown", "choice"} <= row.keys():
                rows += [row] if row["tie"] or {"chosen", "rejected"} <= row.keys() else []
        return rows

    def summary(self) -> dict[str, Any]:
        """GET /api/preferences/summary; agreement excludes ties and equal scores."""
        rows = self.read()
        agrees = []
        for row in rows:
            left, right = (number(side.get("score")) for side in row["shown"])
            if not row["tie"] and np.isfinite(left - right) and left != right:
                agrees.append((left > right) == (row["choice"] == "left"))
        return {
            "count": len(rows),
            "by": dict(Counter(str(row.get("who", "")) for row in rows)),
            "agreement": float(np.mean(agrees)) if agrees else None,
            "pairs_file": str(self.file),
        }

    def write_pairs(self, file: Path) -> int:
        """Write the judgements that are not ties as rows of a preference data set; return their number.

        Raises:
            UserError: if there is no such judgement.
        """
        rows = [
            {"prompt": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"]}
            for row in self.read()
            if not row["tie"]
        ]
        if not rows:
            raise UserError("a reward model learns from judged pairs, there are none: judge some first")
        write_whole(file, "".join(f"{json.dumps(row)}\n" for row in rows))
        return len(rows)

    def _draw(self, sources: Sequence[Samples], key: str) -> ShownPair:
        """Two random completions of a prompt, in random order; one from each source if there are two."""
        drawn = list[tuple[str, dict[str, Any]]]()
        messages = list[dict[str, Any]]()
        for source in sources:
            with source.index.view() as view:
                picked = self._random.sample(view.rows_of_prompt(key).tolist(), 3 - len(sources))
                for row, line in zip(picked, view.lines(picked), strict=True):
                    messages = prompt_messages(line)
                    side = {
                        "run": str(source.run.folder),
                        "step": line["step"],
                        "index": int(view.column("position")[row]),
                        "score": finite(number(line.get("score"))),
                    }
                    drawn.append((str(line["completion"]), side))
        self._random.shuffle(drawn)
        return ShownPair(messages, [completion for completion, _ in drawn], [side for _, side in drawn])


def _prompts_to_judge(sources: Sequence[Samples]) -> list[str]:
    """The keys of prompts with two completions in a source, or with one in each of two sources."""
    keys = []
    for source in sources:
        with source.view() as view:
            keys.append(set(view.ask(_PROMPTS, 3 - len(sources))))
    return sorted(set.intersection(*keys))


def _places(sides: Sequence[dict[str, Any]]) -> frozenset[tuple[Any, ...]]:
    return frozenset((side.get("run"), side.get("step"), side.get("index")) for side in sides)
