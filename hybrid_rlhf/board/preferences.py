"""Judgements of people: two completions of a prompt, blind and in random order; which is better.

They are appended to `preferences.jsonl` in the board's first folder, with what was shown. They tell how often the
reward prefers what people prefer, and are data for `hybrid-rlhf reward`.
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
from numpy.typing import NDArray

from hybrid_rlhf.board.runs.reading import complete_lines, finite, number, open_regular
from hybrid_rlhf.board.samples.lines import prompt_messages
from hybrid_rlhf.board.samples.rows import Samples
from hybrid_rlhf.board.samples.view import IndexView
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.atomic import write_whole

PREFERENCES_FILE = "preferences.jsonl"
_MOST_OPEN = 1000
"""Pairs that were shown and not judged; the oldest are forgotten."""
_TRIES = 40


@dataclass(frozen=True)
class ShownCompletion:
    """One side of a pair."""

    run: str
    """Folder of the run."""
    step: int
    index: int
    completion: str
    score: float | None


@dataclass(frozen=True)
class ShownPair:
    """Two completions of a prompt, as they were shown."""

    prompt: list[dict[str, Any]]
    left: ShownCompletion
    right: ShownCompletion


class Preferences:
    """The judgements of one board."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of the file."""
        self.file = folder / PREFERENCES_FILE
        self._open: OrderedDict[str, ShownPair] = OrderedDict()
        self._random, self._lock = random.Random(secrets.randbits(64)), threading.Lock()  # nosec B311

    def next(self, sources: Sequence[Samples]) -> dict[str, Any]:
        """A pair to judge: of one run, or one side of each of two; without one where no prompt has two completions."""
        judged = {_places(row) for row in self.read()}
        views = [source.view() for source in sources]
        prompts = _prompts_to_judge(views)
        for _ in range(_TRIES if len(prompts) else 0):
            pair = self._draw(sources, views, int(prompts[self._random.randrange(len(prompts))]))
            if pair.left.completion == pair.right.completion or _places_of(pair) in judged:
                continue
            name = secrets.token_hex(8)
            with self._lock:
                self._open[name] = pair
                while len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)
            return {
                "pair": name,
                "prompt": pair.prompt,
                "left": pair.left.completion,
                "right": pair.right.completion,
            }
        return {"pair": None}

    def judge(self, name: str, choice: str, who: str) -> int:
        """Append a judgement; how many there are.

        Raises:
            UserError: if the pair was not shown by this board, or is judged already.
            OSError: if it cannot be written.
        """
        with self._lock:
            pair = self._open.pop(name, None)
            if pair is None:
                raise UserError(f"pair must be one that was shown and not judged yet, got {name[:40]!r}: take the next")
            better, worse = (pair.left, pair.right) if choice != "right" else (pair.right, pair.left)
            row = {
                "prompt": pair.prompt,
                "chosen": better.completion,
                "rejected": worse.completion,
                "tie": choice == "equal",
                "who": who,
                "when_seconds": round(time.time(), 3),
                "shown": [
                    {"run": side.run, "step": side.step, "index": side.index, "score": side.score}
                    for side in (pair.left, pair.right)
                ],
                "choice": choice,
            }
            line = json.dumps(row, allow_nan=False).encode() + b"\n"
            with self.file.open("ab", buffering=0) as file:
                file.write(line)  # one write: two boards may append
                os.fsync(file.fileno())
        return len(self.read())

    def read(self) -> list[dict[str, Any]]:
        """All judgements; lines that are none are left out."""
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
            if isinstance(row, dict) and {"prompt", "chosen", "rejected", "tie", "shown", "choice"} <= row.keys():
                rows.append(row)
        return rows

    def summary(self) -> dict[str, Any]:
        """GET /api/preferences/summary; agreement leaves out ties and equal scores."""
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
        """Write the judgements that are no ties as rows of a preference data set; how many there are.

        Raises:
            UserError: if there are none.
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

    def _draw(self, sources: Sequence[Samples], views: Sequence[IndexView], prompt: int) -> ShownPair:
        """Two random completions of a prompt, of each source one, in random order."""
        rows = [view.rows_of_prompt(prompt).tolist() for view in views]
        picked = self._random.sample(rows[0], 2) if len(rows) == 1 else [self._random.choice(each) for each in rows]
        twice = 3 - len(sources)
        places = zip([*sources] * twice, [*views] * twice, picked, strict=True)
        sides = [_side(source, view, row) for source, view, row in places]
        self._random.shuffle(sides)
        first = sources[0].index.line(views[0], rows[0][0])
        return ShownPair(prompt_messages(first), sides[0], sides[1])


def _prompts_to_judge(views: Sequence[IndexView]) -> NDArray[np.int64]:
    """The numbers of the prompts that have two completions, of two views one in each."""
    numbers = [view.column("prompt_number") for view in views]
    return np.intersect1d(numbers[0], numbers[1]) if len(views) == 2 else numbers[0][views[0].prompt_counts() > 1]


def _side(source: Samples, view: IndexView, row: int) -> ShownCompletion:
    content = source.index.line(view, row)
    return ShownCompletion(
        run=str(source.run.folder),
        step=content["step"],
        index=int(view.column("index")[row]),
        completion=str(content["completion"]),
        score=finite(number(content.get("score"))),
    )


def _places_of(pair: ShownPair) -> frozenset[tuple[Any, ...]]:
    return frozenset((side.run, side.step, side.index) for side in (pair.left, pair.right))


def _places(row: dict[str, Any]) -> frozenset[tuple[Any, ...]]:
    return frozenset((side.get("run"), side.get("step"), side.get("index")) for side in row["shown"])
