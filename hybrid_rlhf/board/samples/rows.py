"""Samples as the API shows them: rows of a list, one with its tokens, and the prompts of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.board.runs.folders import RunFolder
from hybrid_rlhf.board.runs.reading import finite, is_count, number
from hybrid_rlhf.board.samples.index import SampleIndex
from hybrid_rlhf.board.samples.lines import prompt_messages, prompt_number
from hybrid_rlhf.board.samples.queries import PromptQuery, SampleQuery, find, key_number, prompt_key, row_of
from hybrid_rlhf.board.samples.texts import preview
from hybrid_rlhf.board.samples.view import IndexView
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.observability.token_records import TokenRecord, TokenRecords

TokenTexts = Callable[[RunFolder, list[int]], list[str] | None]
"""The text of each token of a run; None: its tokenizer is not here."""
_MOST_BYTES = 4
"""Of a character, so most tokens of one."""
_CATCH_UP_SECONDS = 0.2
"""How long a request waits for lines that are not indexed yet; the watcher indexes the rest."""


_BINS = 20
_LIMIT_ROWS = 2**20
"""Rows that are compared at a time, so that no column is copied whole."""


class UnknownSample(UserError):
    """There is no sample of that step and index, or no prompt of that key."""


class Samples:
    """The samples of one run."""

    def __init__(self, run: RunFolder, token_texts: TokenTexts) -> None:
        """Take the run, and what decodes its tokens."""
        self.run, self.index = run, SampleIndex(run)
        self._records, self._token_texts = TokenRecords(run.folder), token_texts
        self._steps_seen: tuple[str, int, set[int]] = ("", 0, set())
        """Of a generation, in how many rows."""
        self._limits_seen: tuple[str, dict[str, tuple[int, tuple[float, float] | None]]] = ("", {})
        """Of a generation: of each column in how many rows, and its smallest and largest value."""
        self._lock = threading.Lock()

    def page(self, query: SampleQuery) -> dict[str, Any]:
        """GET /api/runs/RUN/samples."""
        view = self.view()
        found = find(view, query)
        return {
            "total": found.total,
            "total_is_limited": found.is_limited,
            "indexed": self.index.progress,
            "steps": self._steps(view),
            "components": list(view.state.components),
            "rows": self._rows(view, found.rows),
        }

    def sample(self, step: int, position: int) -> dict[str, Any]:
        """GET /api/runs/RUN/samples/STEP/INDEX.

        Raises:
            UnknownSample: if there is none.
        """
        row = self.line(step, position)
        messages = prompt_messages(row)
        tokens = self._tokens(step, position)
        return {
            **_numbers(row, position),
            "prompt_key": prompt_key(prompt_number(messages)),
            "prompt": messages,
            "completion": str(row["completion"]),
            "advantage": finite(number(row.get("advantage"))),
            "weight_versions": row.get("weight_versions"),
            "tokens": None if tokens is None else self._shown_tokens(tokens),
            "component_limit": self._component_limit(self.index.view()),
        }

    def distributions(self, step: int | None) -> dict[str, Any]:
        """GET /api/runs/RUN/distributions: how many samples of a step, or of the newest, are in each of equal ranges.

        The ranges are those of the whole run, so that steps can be compared.
        """
        view = self.view()
        steps = self._steps(view)
        chosen = (steps[-1] if steps else None) if step is None else step
        of_step = view.column("step") == chosen
        found: dict[str, Any] = {"step": chosen}
        for name in ("score", "length"):
            limits = self._limits(view, name)
            if limits is None:
                found[name] = None
                continue
            values = view.column(name)[of_step].astype(float)
            counts, edges = np.histogram(values[np.isfinite(values)], bins=_BINS, range=limits)
            found[name] = {"edges": edges.tolist(), "counts": counts.tolist()}
        return found

    def _component_limit(self, view: IndexView) -> float | None:
        """The largest absolute value of a reward component in the run: the scale of their bars."""
        limits = [self._limits(view, f"component/{name}") for name in view.state.components]
        return max((abs(value) for pair in limits if pair is not None for value in pair), default=None)

    def _limits(self, view: IndexView, name: str) -> tuple[float, float] | None:
        """The smallest and the largest finite value of a column, of which rows that were seen are not read again."""
        with self._lock:
            generation, known = self._limits_seen
            if generation != view.state.generation:
                known = {}
            rows, limits = known.get(name, (0, None))
            if rows > view.rows:
                rows, limits = 0, None
            limits = _widened(limits, view.column(name)[rows:])
            known[name] = (view.rows, limits)
            self._limits_seen = (view.state.generation, known)
            return limits

    def line(self, step: int, position: int) -> dict[str, Any]:
        """The row of samples.jsonl of a sample; see `sample`."""
        view = self.view()
        row = row_of(view, step, position)
        if row is None:
            raise UnknownSample(f"step and index must be of a recorded sample, got {step} and {position}: see samples")
        return self.index.line(view, row)

    def prompts(self, query: PromptQuery) -> dict[str, Any]:
        """GET /api/runs/RUN/prompts, the most frequent first."""
        view = self.view()
        counts = view.prompt_counts()
        kept = np.flatnonzero(view.prompt_texts.search(query.text)[0]) if query.text else np.arange(len(counts))
        page = kept[np.argsort(-counts[kept], kind="stable")][query.offset : query.offset + query.limit]
        chosen = np.zeros(len(counts), bool)
        chosen[page] = True
        members = np.flatnonzero(view.rows_of_prompts(chosen))
        place, score, step = (view.column(name)[members] for name in ("prompt", "score", "step"))
        order = np.argsort(place, kind="stable")
        bounds = (np.searchsorted(place, page, side, sorter=order).tolist() for side in ("left", "right"))
        numbers = view.column("prompt_number")[page].tolist()
        lines = self.index.lines(view, view.column("prompt_row")[page])
        rows = []
        for prompt, first, last, key, line in zip(page, *bounds, numbers, lines, strict=True):
            own = order[first:last]
            values = score[own][np.isfinite(score[own])]
            rows.append(
                {
                    "prompt_key": prompt_key(key),
                    "preview": _prompt_preview(prompt_messages(line)),
                    "samples": int(counts[prompt]),
                    "steps": sorted(_distinct(step[own])),
                    "mean_score": finite(values.mean()) if len(values) else None,
                }
            )
        return {"total": len(kept), "rows": rows}

    def of_prompt(self, key: str, most: int) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]]]:
        """The messages of a prompt, none if the run does not have it, and rows of its samples."""
        view = self.view()
        rows = view.rows_of_prompt(key_number(key))[:most]
        if not len(rows):
            return None, []
        messages = prompt_messages(self.index.line(view, int(rows[0])))
        return messages, [{"run": self.run.id, **row} for row in self._rows(view, rows)]

    def view(self) -> IndexView:
        """What is indexed, after a moment for new lines."""
        self.index.update(_CATCH_UP_SECONDS)
        return self.index.view()

    def _rows(self, view: IndexView, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
        lines, places = self.index.lines(view, rows), view.column("index")[rows].tolist()
        return [self._row(line, place) for line, place in zip(lines, places, strict=True)]

    def _row(self, content: dict[str, Any], position: int) -> dict[str, Any]:
        messages = prompt_messages(content)
        return {
            **_numbers(content, position),
            "prompt_key": prompt_key(prompt_number(messages)),
            "prompt_preview": _prompt_preview(messages),
            "completion_preview": preview(content["completion"]),
            "has_tokens": self._records.has(content["step"]),
        }

    def _tokens(self, step: int, position: int) -> TokenRecord | None:
        try:
            return self._records.read(step, position)
        except (FileNotFoundError, IndexError):
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"the token record of step {step} cannot be read ({error}): restore it") from error

    def _shown_tokens(self, record: TokenRecord) -> dict[str, Any]:
        return {
            "prompt_length": record.prompt_length,
            "ids": record.ids,
            "texts": self._token_texts(self.run, record.ids),
            "response": [int(sampled) for sampled in record.response],
            "columns": record.columns,
        }

    def _steps(self, view: IndexView) -> list[int]:
        """The steps of all rows, of which those that were seen are not read again."""
        with self._lock:
            generation, rows, steps = self._steps_seen
            if generation != view.state.generation or rows > view.rows:
                rows, steps = 0, set()
            steps |= _distinct(view.column("step")[rows:])
            self._steps_seen = (view.state.generation, view.rows, steps)
            return sorted(steps)


def _widened(limits: tuple[float, float] | None, column: NDArray[Any]) -> tuple[float, float] | None:
    """Limits that also hold the finite values of a column."""
    low, high = (np.inf, -np.inf) if limits is None else limits
    for first in range(0, len(column), _LIMIT_ROWS):
        part = np.asarray(column[first : first + _LIMIT_ROWS], dtype=float)
        part = part[np.isfinite(part)]
        if len(part):
            low, high = min(low, float(part.min())), max(high, float(part.max()))
    return (low, high) if low <= high else None


def _distinct(steps: NDArray[np.int32]) -> set[int]:
    """The steps of a column in which most neighbours are equal."""
    begins = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    return {*steps[:1].tolist(), *steps[begins].tolist()}


def _prompt_preview(messages: list[dict[str, Any]]) -> str:
    return preview(messages[-1].get("content") if messages else "")


def _numbers(row: dict[str, Any], position: int) -> dict[str, Any]:
    """What a list and a single sample share; older runs lack some of it."""
    parts, group, length = row.get("components"), row.get("group"), row.get("length")
    stopped = row.get("stopped")
    return {
        "step": row["step"],
        "index": position,
        "group": group if is_count(group) else None,
        "score": finite(number(row.get("score"))),
        "kl": finite(number(row.get("kl"))),
        "length": length if is_count(length) else None,
        "components": {str(name): finite(number(value)) for name, value in parts.items()}
        if isinstance(parts, dict)
        else {},
        "stopped": stopped if isinstance(stopped, bool) else None,
    }


def token_texts_of(files: Callable[[RunFolder], list[Path]]) -> TokenTexts:
    """Decodes tokens by the first tokenizer.json of some places; tokenizers are kept."""
    from tokenizers import Tokenizer

    known: dict[str, Any] = {}

    def texts(run: RunFolder, ids: list[int]) -> list[str] | None:
        if run.id not in known:
            file = next((file for file in files(run) if file.is_file()), None)
            if file is None:
                return None
            known[run.id] = Tokenizer.from_file(str(file))
        return _pieces(known[run.id], ids)

    return texts


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token after the one before it: some tokenizers write a space only between two tokens.

    Of a character that several tokens share, the last has the text and the others none.
    """
    pieces, begin = list[str](), 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[max(begin - 1, 0) : begin], skip_special_tokens=False)
        text = tokenizer.decode(ids[max(begin - 1, 0) : end], skip_special_tokens=False)
        text = text.removeprefix(before) if text.startswith(before) else tokenizer.decode(ids[begin:end])
        is_part = text.endswith("\ufffd") and end - begin < _MOST_BYTES and end < len(ids)
        pieces.append("" if is_part else text)
        begin = begin if is_part else end
    return pieces
