"""Judgements of people, who choose the better of two completions of a prompt, blind and in random order.

They are appended to `preferences.jsonl` in the board's first folder, with the shown pair. They measure how often reward
and people agree, and are training data for `hybrid-rlhf reward`.
"""

from __future__ import annotations

import getpass
import json
import os
import random
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_rlhf.board.runs.reading import complete_lines, finite, number
from hybrid_rlhf.board.samples.images import data_uri, shown_images, thumbnail_of
from hybrid_rlhf.board.samples.lines import prompt_messages
from hybrid_rlhf.board.samples.rows import Samples
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.reading import open_regular
from hybrid_rlhf.runtime.observability.samples import recorded_images

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
    """`run` (its folder), `step`, `index` and `score` of each; of a model, its path, and the place of the row in
    `prompts`."""
    columns: dict[str, Any]
    """The other columns of the prompt's row, such as the expected answer; not shown before the judgement."""
    images: Sequence[Mapping[str, Any]] = ()
    """Those of the prompt, as `recorded_images` returns them."""
    prompts: str | None = None
    """The data that two models were asked; None: recorded completions."""


class Preferences:
    """The judgements of one board."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of the file."""
        self.file = folder / PREFERENCES_FILE
        self._open: OrderedDict[str, ShownPair] = OrderedDict()
        self._last: tuple[str, ShownPair, bytes] | None = None
        """The newest judgement of this board: its pair, and its line in the file."""
        self._random = random.Random(secrets.randbits(64))  # nosec B311
        self._lock = threading.Lock()

    def next(self, sources: Sequence[Samples]) -> dict[str, Any]:
        """A pair to judge, of one run or of two runs; without a pair if no prompt has two completions."""
        judged = self._judged(None)
        prompts = _prompts_to_judge(sources)
        for _ in range(_TRIES if prompts else 0):
            pair = self._draw(sources, self._random.choice(prompts))
            if len(set(pair.completions)) == 2 and _places(pair.sides) not in judged:
                return self.show(pair)
        return {"pair": None}

    def unjudged(self, rows: int, models: Sequence[str], prompts: str) -> list[int]:
        """The rows of data whose answers by two models have not been judged, in random order."""
        judged = self._judged(prompts)
        left = [row for row in range(rows) if frozenset((path, None, row) for path in models) not in judged]
        self._random.shuffle(left)
        return left

    def shuffled(
        self, prompt: list[dict[str, Any]], answers: Sequence[tuple[str, dict[str, Any]]], **more: Any
    ) -> ShownPair:
        """Two answers with their sides, in random order."""
        drawn = self._random.sample(list(answers), 2)
        return ShownPair(prompt, [text for text, _ in drawn], [side for _, side in drawn], **more)

    def show(self, pair: ShownPair) -> dict[str, Any]:
        """A pair as a client sees it, to be judged by its name."""
        name = secrets.token_hex(8)
        with self._lock:
            return self._keep(name, pair)

    def undo(self) -> dict[str, Any]:
        """Take this board's newest judgement out of the file, and show its pair again.

        Raises:
            UserError: if there is none, or another board has appended one since.
            OSError: if the file cannot be written.
        """
        with self._lock:
            if self._last is None:
                raise UserError("undo takes back the newest judgement of this board, there is none: judge a pair first")
            name, pair, line = self._last
            with self.file.open("r+b") as file:
                start = file.seek(0, os.SEEK_END) - len(line)
                file.seek(max(0, start))
                if start < 0 or file.read() != line:
                    raise UserError(f"undo takes back the last line of {self.file}, another board has appended to it")
                file.truncate(start)
                os.fsync(file.fileno())
            self._last = None
            return self._keep(name, pair)

    def thumbnail(self, name: str, digest: str) -> bytes:
        """An image of a pair that is shown; raises UserError as `thumbnail_of`."""
        pair = self._open.get(name)
        return thumbnail_of(pair.images if pair else (), digest)

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
                **({"images": pair.images} if pair.images else {}),
                **({"responses": [better, worse]} if is_tie else {"chosen": better, "rejected": worse}),
                "tie": is_tie,
                "who": who,
                "when_seconds": round(time.time(), 3),
                "shown": pair.sides,
                "choice": choice,
                **({"columns": pair.columns} if pair.columns else {}),
                **({"prompts": pair.prompts} if pair.prompts else {}),
            }
            line = json.dumps(row, allow_nan=False).encode() + b"\n"
            with self.file.open("ab", buffering=0) as file:
                file.write(line)  # one write, as another board may also append
                os.fsync(file.fileno())
            self._last = name, pair, line
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
            "can_undo": self._last is not None,
            "user": _user_name(),
        }

    def write_pairs(self, file: Path) -> int:
        """Write the judgements that are not ties as rows of a preference data set; return their number.

        Raises:
            UserError: if there is no such judgement, or the image of one is missing or has changed.
        """
        rows = [
            {"prompt": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"]}
            | ({"images": images} if (images := [*map(data_uri, recorded_images(row))]) else {})
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
        columns: Any = {}
        images = list[dict[str, Any]]()
        for source in sources:
            with source.index.view() as view:
                picked = self._random.sample(view.rows_of_prompt(key).tolist(), 3 - len(sources))
                for row, line in zip(picked, view.lines(picked), strict=True):
                    messages = prompt_messages(line)
                    columns = line.get("columns")
                    images = recorded_images(line)
                    side = {
                        "run": str(source.run.folder),
                        "step": line["step"],
                        "index": int(view.column("position")[row]),
                        "score": finite(number(line.get("score"))),
                    }
                    drawn.append((str(line["completion"]), side))
        return self.shuffled(messages, drawn, columns=columns if isinstance(columns, dict) else {}, images=images)

    def _judged(self, prompts: str | None) -> set[frozenset[tuple[Any, ...]]]:
        """The pairs that have been judged: of data, or recorded ones."""
        return {_places(row["shown"]) for row in self.read() if row.get("prompts") == prompts}

    def _keep(self, name: str, pair: ShownPair) -> dict[str, Any]:
        """A pair as a client sees it, open to be judged; under the lock."""
        self._open[name] = pair
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        left, right = pair.completions
        images = shown_images(pair.images)
        return {"pair": name, "prompt": pair.prompt, "images": images, "left": left, "right": right}


def _user_name() -> str:
    """The user of the board; empty in a container whose user has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        return ""


def _prompts_to_judge(sources: Sequence[Samples]) -> list[str]:
    """The keys of prompts with two completions in a source, or with one in each of two sources."""
    keys = []
    for source in sources:
        with source.view() as view:
            keys.append(set(view.ask(_PROMPTS, 3 - len(sources))))
    return sorted(set.intersection(*keys))


def _places(sides: Sequence[dict[str, Any]]) -> frozenset[tuple[Any, ...]]:
    return frozenset((side.get("run"), side.get("step"), side.get("index")) for side in sides)
